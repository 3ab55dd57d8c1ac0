"""Lowering: a model rewritten for another IR version and opset, node by node and without its weights.

`lower` says what targets accept and what a model needs, and changes a model; `opset` rewrites single nodes. Nothing
here runs a model or writes a file.
"""
