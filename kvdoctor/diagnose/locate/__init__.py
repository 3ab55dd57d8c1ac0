"""Locates a fault by experiment: the node where a judged run fails, or first diverges from the run without a cache.

`search.locate_fault` is the entry; `runnable` and `graph_runner` run parts of a graph for it and for `repair`. A
location is searched only for a bad run, after all experiments; where none is found, the finding stands without it.
"""
