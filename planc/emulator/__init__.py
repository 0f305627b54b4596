"""Kernels on the CPU: in go kernels that were made for a GPU, out comes what they compute."""
