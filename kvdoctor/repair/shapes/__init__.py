"""Shapes as terms: every axis of a graph expressed in the lengths that a caller may choose.

If a number of the graph must agree with such a length (two operands of an addition, the elements before and after a
Reshape), the number stands for it: at any other length the graph would fail. This is derived for all lengths at once,
without running anything. `walk` derives the sizes by the rules of the operators, `freeing` and `writing` change the
graph.
"""
