"""Repairs on the graph: one file for each kind of fault; each says what it requires and what it ensures.

`registry` finds the `REPAIRS` of every module here. A repair is applied only if a check that calls for it fired, and it
is not trusted: the repaired model is diagnosed again. Repairs change the models of a `RepairContext` in memory; they
never write files.
"""
