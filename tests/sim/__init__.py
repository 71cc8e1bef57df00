"""Kernels on a CPU: their arithmetic emulated in numpy, and their PTX interpreted; the tests of both."""
