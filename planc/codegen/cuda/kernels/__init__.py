"""Kernels in Triton and CUDA C++, which are compiled from their files; one may import functions of another."""
