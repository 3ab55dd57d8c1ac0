"""Repairs on the graph: one file each, with what it requires and what it ensures.

`registry` finds every module here that defines `REPAIR`, or `REPAIRS` for several of one idea. A repair is applied only
if a check that calls for it fired, and it is not trusted: the repaired model is diagnosed again. Repairs change the
models of a `RepairContext` in memory; they never write files.
"""
