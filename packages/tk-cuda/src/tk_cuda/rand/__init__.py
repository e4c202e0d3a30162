"""CUDA kernels of the family ``rand``."""
