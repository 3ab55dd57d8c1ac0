"""kvdoctor: the doctor for ONNX decoders with a KV cache."""

__version__ = "0.1.0"
