"""Code generation: in goes a planned graph, out come kernel sources, the step and the shared library."""
