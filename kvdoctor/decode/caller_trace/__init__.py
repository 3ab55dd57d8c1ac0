"""The caller's own loop: a recorded trace is read, compared with the cache contract, and run again in the worker.

`recorded` has the types of a trace, `recording` writes one from inside a program, `read` parses its files, `step`
derives what each past must be, `rules` has a file for each rule, `check` walks over the steps, `replay` is the
experiment that runs them again, and `describe` writes the text. Standard library, numpy and the rest of `decode` only:
nothing here may know ONNX files, findings or reports.
"""
