"""CUDA kernels of the family ``transform``."""
