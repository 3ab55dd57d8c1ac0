"""The naming tables of the exporters: data, one file each. A `Dialect` in a module here is found by itself.

`dialect` has the types and the search. Names are hints that save work; the graph decides what a tensor is.
"""
