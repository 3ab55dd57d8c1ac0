"""The part of the conversions that runs in the worker: copy and original side by side, and what a narrow cache costs.

Standard library, numpy and what the worker itself imports. Nothing outside of the worker imports it.
"""
