"""What an export made afresh must show: no error, the logits of the checkpoint, and the words that it decodes."""

from collections.abc import Iterator

from kvdoctor.cure.proof import LOOPS
from kvdoctor.reference import GREEDY, NAME
from kvdoctor.report.document import Proof, Report
from kvdoctor.trace import Run

CLAIMS = {NAME: "logits are those of PyTorch", GREEDY: "greedy tokens are those of PyTorch"}


def prove(after: Report, repaired: set[str]) -> Iterator[Proof]:
    """What holds of each stack, and what does not. The loops of `repaired` ones are proved already."""
    driven = [stack for stack in after.stacks if stack.contract is not None]
    if not driven:
        yield Proof("export", "it holds a decoder with a cache", False, "none could be read")
    for stack in driven:
        errors = sorted({f.name for f in after.findings if f.severity == "error" and f.stack in (stack.name, None)})
        yield Proof(stack.name, "no error is found", not errors, ", ".join(errors))
        runs = {run.experiment: run for run in after.runs if run.stack == stack.name}
        loops = [runs[name] for name in LOOPS if name in runs and runs[name].outcome != "skipped"]
        for run in loops if stack.name not in repaired else ():
            yield Proof(stack.name, f"{run.experiment} passes", run.shows == "passed", f"{len(run.steps)} steps")
        if not loops:
            yield Proof(stack.name, "plain-loop passes", False, "no loop could be run")
        yield from _against_pytorch(stack.name, runs, after)


def _against_pytorch(stack: str, runs: dict[str, Run], after: Report) -> Iterator[Proof]:
    obstacle = next((e.reason for e in after.not_checked if e.code == "KV320" and e.stack == stack), "")
    for experiment, claim in CLAIMS.items():
        run = runs.get(experiment)
        held = run is not None and run.outcome == "passed" and run.reason is not None
        reason = (run.reason if run is not None else None) or obstacle or "it was not held against the checkpoint"
        yield Proof(stack, claim, held, obstacle if not held and obstacle else reason)
