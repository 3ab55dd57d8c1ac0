"""The checks: one file each, named for the fault, with its documentation in its docstring."""
