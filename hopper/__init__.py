"""Kernels for SM90 in CuTe-DSL."""
