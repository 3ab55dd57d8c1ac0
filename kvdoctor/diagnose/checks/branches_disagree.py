"""The two branches, or the two files, compute different functions.

What it means: the graph that fills the cache and the graph that reads it have different weights or different
operations: files of two exports were combined, or only one of them was quantized or trained further. One graph does so
as well where it chooses weights, constants or operations by the length of the past.

How it is decided: the cached branch is run with an empty past, where no cache, position or mask can be at fault. Its
logits for the first token differ from those of the branch without a past. In one graph, what a step chooses by
comparing lengths is replaced by what the run without a cache chooses, which makes the logits right.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `why`.

Repair: export both files again from one checkpoint.
"""

from kvdoctor.diagnose.checks._faults import CauseText, check_cause

WORDS = CauseText(
    cause="a step with a past computes another function than a call without one",
    declared="the same logits for the first token from both",
    advice="export again: two files from the same checkpoint, or one file that computes the same at every length",
)
check_cause(__name__, "KV311", "branches-disagree", "runs", WORDS)
