"""The place of a fault: the node where a judged run fails or parts from the run without a cache, found by experiment.

Looked for only where a run is bad, after all experiments. What cannot be found is left out with a reason: the finding
stands without it.
"""
