"""Running a model: the worker process, its limits, isolated environments and target runtimes.

The parent's side is `client` and `process`; the child's side is `worker`, the only code that imports onnxruntime. It
must not know checks, findings or reports: it hands back what was observed.
"""
