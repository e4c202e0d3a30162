"""Building blocks that kernels of several operators share."""
