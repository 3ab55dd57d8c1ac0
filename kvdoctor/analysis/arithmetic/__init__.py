"""What a graph computes with: scales, caps, frequencies, activations and norms, as a config declares them.

Each reader finds constants, or what is computed of constants alone, and names the node that holds them. A form that no
reader knows gives no value, never a wrong one. Nothing is run, and of weights only a few numbers are read.
"""
