"""Sizes as terms: every axis of a graph written in the lengths that a caller may choose.

Where a number that the graph holds must agree with such a length (two operands of an addition, the elements before and
behind a Reshape), the number stands for it: at any other length the graph would fail. That is worked out for all
lengths at once, without running anything; whether a graph that was changed by it is right is for runs to say.
"""
