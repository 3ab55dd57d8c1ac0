"""What a graph means: files become stacks, and a stack becomes a cache contract.

Everything is read from the graph, its configuration files and the naming tables of exporters; nothing is run.
It may import `model` and the leaf modules. It must not know runtimes, experiments that ran, checks or reports.
"""
