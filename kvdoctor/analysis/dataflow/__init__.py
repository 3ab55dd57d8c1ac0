"""What a graph does with its inputs, whatever their names are.

`states` follows a past to the output that carries it on, `uses` says what a value is used for, `walks` says which
values depend on which. Imported from `analysis` and, for its operator tables, from `repair`; it knows `model` only.
"""
