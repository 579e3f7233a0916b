"""Compiled code: Numba kernels, the functions that they are made of, and the tasks that call them."""
