"""Tests that need a CUDA device, the matrix of what they run, and the tests of the matrix itself."""
