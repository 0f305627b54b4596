"""The runtime: a plan directory goes in, tokens and HTTP come out. Imports no torch, transformers, triton or onnx."""
