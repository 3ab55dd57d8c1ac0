"""A cache for a decoder that has none: each call then takes the new tokens alone.

Its axes are read from abstract runs at two lengths (`sizes`), labelled from the tokens on (`token_axes`), and cut where
a row of attention mixes positions (`key_sides`). `rewrite` changes the graph, and computes sizes, positions and masks
of the whole sequence; `convert` proves the copy. Nothing here knows the names of an exporter.
"""
