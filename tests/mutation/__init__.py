"""Change the kernels and the Python beside them, one line at a time, and see the vectors notice."""
