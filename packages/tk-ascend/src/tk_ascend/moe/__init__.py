"""Ascend kernels of mixture-of-experts routing."""
