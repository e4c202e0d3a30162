"""Ascend kernels of random numbers."""
