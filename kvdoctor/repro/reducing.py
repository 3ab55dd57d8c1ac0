"""From the smallest candidate to the largest: the first that shows the failure is handed over.

Every cut is a guess that a run confirms: layers led past, outputs dropped, sizes made smaller. The last candidate is
the whole model without its weights; where even that does not show the failure, it hangs on the weights themselves.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvdoctor.repro.candidate import Candidate
from kvdoctor.repro.layers import inside, lead_past_layers, without_layers
from kvdoctor.repro.sizes import Sizes, smaller
from kvdoctor.repro.surgery import PROBE, copied, end_at, keep_outputs, scopes
from kvdoctor.scoping import needed_for
from kvdoctor.script import Given, Returned, ScriptCall
from kvdoctor.trace import Step

MOST_RUNS, MOST_SECONDS = 60, 120.0
SMALL = 16 << 10
"""Bytes of noise below which sizes stay what they are."""

LARGEST = 200 << 20
"""Bytes of noise above which a reproducer is nothing to send."""

MOST_OUTPUTS = 2
"""Outputs tried alone, the cheapest first."""

STRENGTHS = (1.0, 2.0, 0.5)
"""How strong the noise is in matrices: too weak, and attention sees nothing; too strong, and it sees one token."""

Sees = Callable[[Candidate], bool]


@dataclass(frozen=True)
class Target:
    """What the search may go by: the failing node, and the steps of the run where the last one may be made alone.

    A call is alone when its past is made up. That is right where any past of that shape fails, and hides the fault
    where the past itself is what is wrong.
    """

    node: str = ""
    steps: tuple[Step, ...] = ()


@dataclass
class Reduction:
    """The search for the smallest candidate, within bounds of runs and seconds."""

    sees: Sees
    target: Target
    runs: int = 0
    began: float = field(default_factory=time.monotonic)
    too_large: int | None = None

    def smallest(self, whole: Candidate) -> Candidate | None:
        """The first candidate that shows the failure, made smaller where layers can be left out."""
        for candidate in self._candidates(whole):
            if self._shows(candidate):
                if whole.script.kind == "refused":
                    return self._with_fewer_outputs(candidate)
                return self._with_fewer_layers(candidate) if whole.script.kind == "differs" else candidate
        return None

    @property
    def spent(self) -> bool:
        """Whether the bounds are reached."""
        return self.runs >= MOST_RUNS or time.monotonic() - self.began > MOST_SECONDS

    def _shows(self, candidate: Candidate) -> bool:
        size = candidate.weight_bytes()
        if size > LARGEST:
            self.too_large = size
            return False
        if self.spent:
            return False
        self.runs += 1
        return self.sees(candidate)

    def _candidates(self, whole: Candidate) -> Iterator[Candidate]:
        calls_end = whole.script.kind in ("fails", "dies")
        cuts = itertools.chain(_sliced(whole, self.target), [whole]) if calls_end else [whole]
        strengths = STRENGTHS if whole.script.kind == "differs" else STRENGTHS[:1]
        for cut in cuts:
            for strength in strengths:
                for sizes in _sizes_for(cut):
                    yield replace(cut, sizes=sizes, strength=strength)

    def _with_fewer_layers(self, candidate: Candidate) -> Candidate:
        """Leave out one layer after the other, as long as the failure stays."""
        layers = sorted({slot.layer for slot in candidate.contract.slots if slot.layer is not None})
        left = list(layers)
        block = max(len(layers) // 2, 1)
        while block:
            for start in range(len(layers) - block, -1, -block):
                gone = [layer for layer in layers[start : start + block] if layer in left]
                if not gone or len(gone) == len(left):
                    continue
                fewer = _without(candidate, gone, left)
                if fewer is not None and self._shows(fewer):
                    candidate = fewer
                    left = [layer for layer in left if layer not in gone]
            block //= 2
        return candidate

    def _with_fewer_outputs(self, candidate: Candidate) -> Candidate:
        """Leave out outputs of a file that does not open, with all that only they need."""
        (file,) = candidate.models
        left = [value.name for value in candidate.models[file].graph.output]
        block = len(left) // 2
        while block:
            for start in range(len(left) - block, -1, -block):
                fewer = left[:start] + left[start + block :]
                if not fewer:
                    continue
                model = copied(candidate.models[file])
                keep_outputs(model, set(fewer))
                cuts = ("outputs that it does not need to be refused",)
                smaller_one = replace(candidate, models={file: model}, cuts=cuts)
                if self._shows(smaller_one):
                    candidate, left = smaller_one, fewer
            block = min(block, len(left)) // 2
        return candidate


def _sizes_for(candidate: Candidate) -> Iterator[Sizes]:
    sizes = smaller(candidate.contract)
    if sizes and candidate.weight_bytes() > SMALL:
        yield sizes
    yield Sizes()


def _sliced(whole: Candidate, target: Target) -> Iterator[Candidate]:
    """The call alone before the loop; around the failing node before all that the calls need; shorter before longer.

    Where layers are led past, an earlier call must be there as well: that it runs shows that the cut is sound.
    """
    alone = _alone(whole, target)
    for start in (alone, whole) if alone is not None else (whole,):
        for past_layers in (True, False) if target.node else ():
            if not past_layers or len(start.script.calls) > 1:
                yield from _some(_around(start, target.node, past_layers))
    for start in (alone, whole) if alone is not None else (whole,):
        for output in _cheapest(start):
            yield from _some(_kept(start, {start.script.calls[-1].file: {output}}))


def _cheapest(start: Candidate) -> list[str]:
    """Outputs of the last file to try as the only ones, by the nodes that they need; logits need most of all.

    Those that need no past that grows are left out: without a past there is nothing to go wrong.
    """
    grown = {slot.past for slot in start.contract.growing}
    model = start.models[start.script.calls[-1].file]
    costs: dict[str, int] = {}
    for output in model.graph.output:
        behind = [(graph, value) for graph in scopes(model) if (value := inside(model, graph, output.name))]
        needed = [needed_for(graph, [value]) for graph, value in behind]
        if not grown or any(not grown.isdisjoint(names) for names in needed):
            costs[output.name] = sum(map(len, needed))
    ordered = sorted(costs, key=lambda name: costs[name])
    return list(dict.fromkeys((*ordered[:MOST_OUTPUTS], *ordered[-1:])))


def _some(candidate: Candidate | None) -> Iterator[Candidate]:
    if candidate is not None:
        yield candidate


def _alone(whole: Candidate, target: Target) -> Candidate | None:
    """The failing call by itself, behind the last that ran; each fed noise of the shapes that the loop brought."""
    calls, steps = whole.script.calls, target.steps
    if not steps or not any(isinstance(value, Returned) for value in calls[-1].feeds.values()):
        return None
    made_up = [_with_past_made_up(calls[-1], steps[-1])]
    before = next((call for call in calls if call.title == f"step {steps[-2].step}"), None) if steps[1:] else None
    if before is not None and before.file == calls[-1].file and steps[-2].phase == steps[-1].phase:
        made_up.insert(0, _with_past_made_up(before, steps[-2]))
    if None in made_up:
        return None
    script = replace(whole.script, calls=tuple(call for call in made_up if call is not None))
    return replace(whole, script=script, cuts=(*whole.cuts, "the loop: the past of its calls is made up"))


def _with_past_made_up(call: ScriptCall, step: Step) -> ScriptCall | None:
    """The call fed noise in place of what was returned; None where that was an empty tensor: no noise is like it."""
    feeds = dict(call.feeds)
    for index, (name, value) in enumerate(call.feeds.items()):
        if isinstance(value, Returned):
            seen = step.fed.get(name)
            if seen is None or seen.empty:
                return None
            feeds[name] = Given(seen.dtype, seen.shape, seed=100 + index)
    return replace(call, feeds=feeds)


def _around(start: Candidate, node: str, past_layers: bool) -> Candidate | None:
    """Only what the failing node needs, and what fills the past that it needs."""
    models = {file: copied(model) for file, model in start.models.items()}
    file = start.script.calls[-1].file
    cuts = [*start.cuts, f"all that node {node!r} does not need"]
    if past_layers:
        if not lead_past_layers(models, start.contract, (file, node)):
            return None
        cuts.append("the layers in front of it")
    if not end_at(models[file], node):
        return None
    return _kept(replace(start, models=models, cuts=tuple(cuts)), {file: {PROBE}})


def _kept(start: Candidate, ends: dict[str, set[str]]) -> Candidate | None:
    """Drop outputs that nothing is fed by; `ends` are outputs that stay, by file."""
    keep = {file: set(ends.get(file, ())) for file in start.models}
    while True:
        models = {file: copied(model) for file, model in start.models.items()}
        for file, outputs in keep.items():
            if outputs:
                keep_outputs(models[file], outputs)
            else:
                del models[file]
        smaller_one = replace(start, models=models)
        known = smaller_one.inputs
        script = start.script.fitting({file: known.get(file, set()) for file in start.models})
        wanted = {(script.calls[v.call].file, v.output) for _, _, v in script.inputs() if isinstance(v, Returned)}
        if all(output in keep[file] for file, output in wanted):
            return replace(smaller_one, script=script)
        for file, output in wanted:
            keep[file].add(output)


def _without(candidate: Candidate, gone: list[int], left: list[int]) -> Candidate | None:
    """The candidate without some of the layers that are left."""
    found = without_layers(candidate.models, candidate.contract, gone, left)
    if found is None:
        return None
    words = f"layer{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
    return replace(candidate, models=found[0], contract=found[1], cuts=(*candidate.cuts, words))
