"""Layouts: how the graphs of a decoder are split, named and distributed over files; one file for each kind.

`registry` finds every module here that defines `LAYOUT` or `LAYOUTS`. A layout is made from a stack whose contract is
known, on models without their weights, which are copied from file to file when the new models are written. Nothing here
runs a model.
"""
