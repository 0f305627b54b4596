"""A plan as ONNX: in goes a plan directory, out comes a file that onnxruntime runs and Netron shows."""
