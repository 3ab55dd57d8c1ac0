"""A length that is declared usable fails, or is wrong.

What it means: a config, or the size of a buffer, says how many tokens a sequence may have, and the loop fails or gives
other logits than the reference run before that: a position table, a rotary table or a mask ends earlier. Or positions
stop counting: from some place on all tokens have one number, with the cache and without, so that both agree and both
are wrong. That a step fails beyond the declared length is a fact of the contract and no fault.

How it is decided: the loop is run to the declared length. One token at each of 50 places must have another key in the
first layer at every place, or, where keys hold no position, at none.

Reproduce: `kvdoctor step-test MODEL --thorough -v`, experiments `full-context` and `numbering`.

Repair: export again with tables of the declared length, or declare what the graph can do. `--require full-context`
runs the experiment and makes the finding an error.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, decided
from kvdoctor.checks.side_cars.shown import positions
from kvdoctor.checks.step_fails import explained_elsewhere, fails_only_so
from kvdoctor.findings import Fault, check

NUMBERS = Words(
    cause="positions stop counting before the length that is declared usable",
    promised="a position of its own for each token, up to the declared length",
    advice="export again with tables of the declared length, or declare what the graph can do",
)


@check("KV209", "context-limit-fails", "runs", needs=("full-context", "numbering"))
def context_limit_fails(case: Case) -> Iterator[Fault]:
    """The full context, where fewer tokens are right."""
    if explained_elsewhere(case) or case.contract is None or case.contract.usable_length is None:
        return
    if (positions(case) or case.contract.usable_length) < case.contract.usable_length:
        return  # the config promises more than the table of positions holds, which KV020 says
    numbering = case.run("numbering")
    if numbering is not None and numbering.cause is not None:
        yield decided(case, numbering, NUMBERS, "warning")
        return
    for outcome in ("failed", "differs"):
        for run, use in fails_only_so(case, outcome):
            if run.experiment != "full-context" or not run.steps:
                continue
            last = next((s for s in run.steps if s.step == run.failed_step), run.steps[-1])
            tokens = last.past_length + last.new_tokens
            words = Words(
                cause=f"a sequence of {tokens} tokens is declared usable, and {'fails' if run.error else 'is wrong'}",
                promised=f"{case.contract.usable_length} tokens, by the config or the smallest buffer",
                advice="export again with tables of the declared length, or declare what the graph can do",
            )
            fault = decided(case, run, words, use.severity)
            place = f'{run.node.op} "{run.node.name}"' if run.node else fault.where
            observed = f"step {run.failed_step}: {run.error}" if run.error else fault.observed
            yield replace(fault, where=place, observed=observed, use=use.required)
