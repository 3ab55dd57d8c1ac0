"""`diff A B`: compares two models, or a model with an earlier report.

Both sides are diagnosed with the same options, in one worker, with feeds from the same seed (`sides`). Their stacks are
matched; then `contract_diff`, `graph_diff`, `run_diff` and `findings_diff` compare contracts, graphs, runs with their
logits, and findings. `pipeline` derives the verdict.

Commands import `DiffRequest` and `compare` from this package. It must not know how a diff is printed, and must not
import `reproducer`, `gating` or `cli`.
"""

from kvdoctor.comparison.pipeline import DiffRequest, compare

__all__ = ("DiffRequest", "compare")
