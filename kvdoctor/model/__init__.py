"""ONNX files and their protobufs: reading, viewing, writing flat, editing and writing models.

No weights are loaded unless a caller asks for them, and broken files end in an error of `errors`. It must not know
what a graph means: caches, slots and contracts belong to `analysis`.
"""
