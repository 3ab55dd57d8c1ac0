"""`diff` and `record`: compares two models, or a model with an earlier report, and records what a model returns.

Both sides are diagnosed with the same options, in one worker, with feeds from the same seed (`sides`). Their stacks are
matched; then `contract_diff` compares the contracts and graphs, `results_diff` runs with their logits, and findings.
`pipeline` derives the verdict.

Golden numbers, with which the core compares (`diagnose/decodings`), may be side A of a diff. It must not know another
add-on, or the gate.
"""

TAKES = {"diff": ("run", "download"), "record": ("run", "policy")}
"""What its commands take of the core's options (`kvdoctor.options`)."""
