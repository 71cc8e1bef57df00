"""An interpreter of the PTX that the kernels compile to."""
