"""CUDA kernels of the family ``quant``."""
