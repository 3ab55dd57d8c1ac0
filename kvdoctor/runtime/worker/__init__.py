"""The worker process: the only code that imports onnxruntime.

It runs whole experiments and answers with small facts. The standard library, numpy, onnxruntime, `decode` and the leaf
modules are all that it may import, since it also starts under old releases in bare environments.
"""
