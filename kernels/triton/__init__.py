"""Kernels in Triton; the reference of each is in ``reference``."""
