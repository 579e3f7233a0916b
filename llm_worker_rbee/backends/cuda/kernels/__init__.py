"""Compiled code: Triton kernels and the functions that launch them."""
