"""The part of the reproducer that runs in the worker: it records a script of calls, and plays one.

Standard library, numpy and what the worker itself imports. Nothing outside of the worker imports it.
"""
