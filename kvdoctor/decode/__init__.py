"""How a model is called: what a decode step is fed, what came back, and which experiments are run.

Feeds, experiments, runs, logits parity and the traces of a user's own loop live here. Only the standard library, numpy
and the leaf modules of the package may be imported, since the worker loads this room in an environment that holds
nothing but an old onnxruntime. It must not know ONNX files, graphs, checks or reports.
"""
