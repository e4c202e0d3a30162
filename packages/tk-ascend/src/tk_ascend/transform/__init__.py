"""Ascend kernels of transpositions and rotary embedding."""
