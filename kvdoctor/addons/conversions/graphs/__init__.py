"""Conversions: what a graph takes and returns, changed on request and proved against the original; one file for each.

`conversion` finds every module here that defines `CONVERSION`. A conversion changes the models of a working copy, which
are read without their weights, and says what a loop must do from then on. Where the graph is not of the form that it
knows, it names the node. Copy and original run side by side.

A decoder without a cache gets one by `new_cache`, from what the axes of its values count (`cache_axes`, `token_axes`).
"""
