"""Tests of the host side of kernels: configurations, plans, dispatch, builds, the kernel cache."""
