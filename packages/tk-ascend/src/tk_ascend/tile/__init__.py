"""What several Ascend kernels share."""
