"""Decoders of strangers: drawn from what ONNX decoders are like, right and faulty, measured on ONNX Runtime alone."""
