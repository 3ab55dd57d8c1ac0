"""Searches for the smallest candidate that shows the failure, from small ones to large ones.

Each cut is a guess that a run confirms: removed layers, removed outputs, smaller sizes. The last candidate is the whole
model without its weights; if that does not show the failure either, the failure depends on the weights.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvdoctor.addons.reproducer.layers import (
    PROBE,
    bypass_layers,
    end_at_node,
    inner_value,
    keep_outputs,
    layer_graphs,
    remove_layers,
)
from kvdoctor.addons.reproducer.messages import MadeArray, PriorOutput, ScriptCall
from kvdoctor.addons.reproducer.oracle import Candidate
from kvdoctor.addons.reproducer.weights import SizeMap, choose_sizes
from kvdoctor.decode.runs import Step
from kvdoctor.model.traverse import needed_for

T = TypeVar("T")

MAX_RUNS, MAX_SECONDS = 60, 120.0
SMALL_BYTES = 16 << 10
"""With fewer bytes of noise, sizes are not made smaller."""

MAX_BYTES = 200 << 20
"""A reproducer with more bytes of noise is too large to send."""

MAX_OUTPUTS = 2
"""The number of outputs that are tried alone, those with the fewest nodes first."""

STRENGTHS = (1.0, 2.0, 0.5)
"""Factors of the noise in matrices: if it is weak, attention is uniform; if it is strong, it selects one token."""


@dataclass
class Reduction:
    """The search for the smallest candidate, within limits of runs and time.

    `node` is the failing one, `steps` are those of the run if its last call may run with a synthetic past: it needs
    no earlier calls then. That is valid if any past of that shape fails, and hides the fault if the content is wrong.
    """

    shows_failure: Callable[[Candidate], bool]
    node: str = ""
    steps: tuple[Step, ...] = ()
    runs: int = 0
    started: float = field(default_factory=time.monotonic)
    too_large: int | None = None

    def find_smallest(self, whole: Candidate) -> Candidate | None:
        """The first candidate that shows the failure, with as many layers or outputs removed as possible."""
        for candidate in self._candidates(whole):
            if self._test(candidate):
                if whole.script.kind == "refused":
                    return self._remove_outputs(candidate)
                return self._remove_layers(candidate) if whole.script.kind == "differs" else candidate
        return None

    @property
    def is_exhausted(self) -> bool:
        """Whether a limit is reached."""
        return self.runs >= MAX_RUNS or time.monotonic() - self.started > MAX_SECONDS

    def _test(self, candidate: Candidate) -> bool:
        size = candidate.weight_bytes()
        if size > MAX_BYTES:
            self.too_large = size
            return False
        if self.is_exhausted:
            return False
        self.runs += 1
        return self.shows_failure(candidate)

    def _candidates(self, whole: Candidate) -> Iterator[Candidate]:
        calls_end = whole.script.kind in ("fails", "dies")
        slices = itertools.chain(_slice(whole, self.node, self.steps), [whole]) if calls_end else [whole]
        strengths = STRENGTHS if whole.script.kind == "differs" else STRENGTHS[:1]
        for cut in slices:
            for strength in strengths:
                sizes = choose_sizes(cut.contract)
                if sizes and cut.weight_bytes() > SMALL_BYTES:
                    yield replace(cut, sizes=sizes, strength=strength)
                yield replace(cut, sizes=SizeMap(), strength=strength)

    def _remove_layers(self, candidate: Candidate) -> Candidate:
        def without(smaller: Candidate, gone: list[int], left: list[int]) -> Candidate | None:
            found = remove_layers(smaller.models, smaller.contract, gone, left)
            cuts = (*smaller.cuts, f"layer{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}")
            return None if found is None else replace(smaller, models=found[0], contract=found[1], cuts=cuts)

        layers = {slot.layer for slot in candidate.contract.slots if slot.layer is not None}
        return self._remove_blocks(candidate, sorted(layers), without)

    def _remove_outputs(self, candidate: Candidate) -> Candidate:
        (file,) = candidate.models

        def without(smaller: Candidate, gone: list[str], left: list[str]) -> Candidate:
            model = deepcopy(smaller.models[file])
            keep_outputs(model, set(left).difference(gone))
            return replace(smaller, models={file: model}, cuts=("outputs that the refusal does not depend on",))

        return self._remove_blocks(candidate, [value.name for value in candidate.models[file].graph.output], without)

    def _remove_blocks(
        self, candidate: Candidate, parts: list[T], without: Callable[[Candidate, list[T], list[T]], Candidate | None]
    ) -> Candidate:
        """The candidate without as many parts as possible: blocks of half of them are tried first, single ones last.

        `without` makes the candidate that lacks a block, of the parts that are left; None where that cannot be.
        """
        left, block = list(parts), max(len(parts) // 2, 1)
        while block:
            for start in range(len(parts) - block, -1, -block):
                gone = [part for part in parts[start : start + block] if part in left]
                fewer = without(candidate, gone, left) if 0 < len(gone) < len(left) else None
                if fewer is not None and self._test(fewer):
                    candidate, left = fewer, [part for part in left if part not in gone]
            block //= 2
        return candidate


def _slice(whole: Candidate, node: str, steps: tuple[Step, ...]) -> Iterator[Candidate]:
    """The cuts to try, the smallest first: the call alone, then the loop; around the failing node, then whole outputs.

    If layers are removed, an earlier call must be in the script as well: if it runs, the cut is valid.
    """
    alone = _isolate_call(whole, steps)
    for start in (alone, whole) if alone is not None else (whole,):
        for past_layers in (True, False) if node else ():
            if not past_layers or len(start.script.calls) > 1:
                yield from filter(None, [_cut_around(start, node, past_layers)])
    for start in (alone, whole) if alone is not None else (whole,):
        for output in _smallest_outputs(start):
            yield from filter(None, [_keep_needed(start, {start.script.calls[-1].file: {output}})])


def _smallest_outputs(start: Candidate) -> list[str]:
    """Outputs of the last file to try alone: those that need the fewest nodes, and the one that needs the most.

    Outputs that do not depend on a growing past are left out: they cannot show the failure.
    """
    growing = {slot.past for slot in start.contract.growing}
    model = start.models[start.script.calls[-1].file]
    costs: dict[str, int] = {}
    for output in model.graph.output:
        values = [(graph, value) for graph in layer_graphs(model) if (value := inner_value(model, graph, output.name))]
        needed = [needed_for(graph, [value]) for graph, value in values]
        if not growing or any(not growing.isdisjoint(names) for names in needed):
            costs[output.name] = sum(map(len, needed))
    ordered = sorted(costs, key=lambda name: costs[name])
    return list(dict.fromkeys((*ordered[:MAX_OUTPUTS], *ordered[-1:])))


def _isolate_call(whole: Candidate, steps: tuple[Step, ...]) -> Candidate | None:
    """The failing call after the last that succeeded, both with noise for the past, in the shapes of the loop."""
    calls = whole.script.calls
    if not steps or not any(isinstance(value, PriorOutput) for value in calls[-1].feeds.values()):
        return None
    isolated = [_with_synthetic_past(calls[-1], steps[-1])]
    before = next((call for call in calls if call.title == f"step {steps[-2].step}"), None) if steps[1:] else None
    if before is not None and before.file == calls[-1].file and steps[-2].phase == steps[-1].phase:
        isolated.insert(0, _with_synthetic_past(before, steps[-2]))
    if None in isolated:
        return None
    script = replace(whole.script, calls=tuple(call for call in isolated if call is not None))
    return replace(whole, script=script, cuts=(*whole.cuts, "the loop: its calls have a synthetic past"))


def _with_synthetic_past(call: ScriptCall, step: Step) -> ScriptCall | None:
    """The call with noise in place of returned values; None if one of them was an empty tensor."""
    feeds = dict(call.feeds)
    for index, (name, value) in enumerate(call.feeds.items()):
        if isinstance(value, PriorOutput):
            observed = step.fed.get(name)
            if observed is None or observed.empty:
                return None
            feeds[name] = MadeArray(observed.dtype, observed.shape, seed=100 + index)
    return replace(call, feeds=feeds)


def _cut_around(start: Candidate, node: str, past_layers: bool) -> Candidate | None:
    """The part of the models that the failing node and its past need."""
    models = {file: deepcopy(model) for file, model in start.models.items()}
    file = start.script.calls[-1].file
    cuts = [*start.cuts, f"everything that node {node!r} does not need"]
    if past_layers:
        if not bypass_layers(models, start.contract, (file, node)):
            return None
        cuts.append("the layers before it")
    if not end_at_node(models[file], node):
        return None
    return _keep_needed(replace(start, models=models, cuts=tuple(cuts)), {file: {PROBE}})


def _keep_needed(start: Candidate, ends: dict[str, set[str]]) -> Candidate | None:
    keep = {file: set(ends.get(file, ())) for file in start.models}
    while True:
        models = {file: deepcopy(model) for file, model in start.models.items()}
        for file, outputs in keep.items():
            if outputs:
                keep_outputs(models[file], outputs)
            else:
                del models[file]
        smaller = replace(start, models=models)
        known = smaller.inputs
        script = start.script.fitting({file: known.get(file, set()) for file in start.models})
        needed = {(script.calls[v.call].file, v.output) for _, _, v in script.inputs() if isinstance(v, PriorOutput)}
        if all(output in keep[file] for file, output in needed):
            return replace(smaller, script=script)
        for file, output in needed:
            keep[file].add(output)
