"""`diff A B`: two models held against one another, or a model against a report of it that was written earlier.

Both sides are diagnosed under the same options, on one worker, with feeds from the same seed. Stacks are matched; then
the contracts, the graphs, the experiments, the findings and the logits are compared, each in a module of its own; the
verdict is made of what they say.
"""

from kvdoctor.comparing.diffing import Request, compare

__all__ = ("Request", "compare")
