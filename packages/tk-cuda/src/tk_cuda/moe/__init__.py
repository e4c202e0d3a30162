"""CUDA kernels of the family ``moe``."""
