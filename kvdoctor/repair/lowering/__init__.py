"""Lowering: a model rewritten for an older IR version and opset, node by node and without its weights.

`limits` says what targets accept and what a model needs, `lower` changes a model, `opset` and `older_schema` rewrite
single nodes. Nothing here runs a model or writes a file.
"""
