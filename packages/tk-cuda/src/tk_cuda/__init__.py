"""TileLang kernels for NVIDIA GPUs: the backend ``cuda`` of tk-core.

Kernels live in ``tk_cuda/FAMILY/NAME.py`` and are imported when their operator is first called. TileLang is imported
only to compile a kernel that no cache holds.
"""
