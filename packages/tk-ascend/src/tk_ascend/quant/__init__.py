"""Ascend kernels of the casts."""
