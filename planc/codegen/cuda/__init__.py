"""The CUDA target: in goes a graph, out come Triton kernels and the launches that run them."""
