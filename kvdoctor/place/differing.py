"""The place of a step whose logits differ: the two calls side by side, and what their comparison means in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.contract import CacheContract, PhaseName, Slot
from kvdoctor.place.bench import Bench, NoPlace
from kvdoctor.place.failing import written_out
from kvdoctor.place.flat import Flat
from kvdoctor.place.pairs import Graph
from kvdoctor.place.parting import Parted, Parting, Sides, Take
from kvdoctor.place.words import layer_in, layers, node_of, scope_of
from kvdoctor.tolerances import tolerance
from kvdoctor.trace import Blame, Place, Seen, Step

CONTENT = ("token_ids", "token_and_position", "embeddings", "encoder_states", "past")
LEVELS = ("basic", "extended", "all")

MOST_TOLD = 1e6
"""Spreads that a value may be off by before its spread is no measure: that of equal numbers is none."""


@dataclass(frozen=True)
class Phase:
    """A graph as it serves a phase: its name there, its file and the branches that it takes."""

    name: PhaseName
    file: Path
    taken: dict[str, bool]


@dataclass
class Differing:
    """The search for where a step with the cache parts from the run without; `before` is the step before it."""

    bench: Bench
    contract: CacheContract
    step: Step
    before: Step | None
    total: int
    left: Phase
    right: Phase
    feeds: tuple[Path, Path]
    provider: str

    def place(self) -> Place:
        """Find the place.

        Raises:
            NoPlace: it cannot be found.
            TrialFailed: the runtime does not run the graph with other outputs.
        """
        sides = self._sides()
        parting = Parting(self.bench, sides)
        parted = parting.search()
        if parted is None:
            return self._outside(parting.pairs[sides.logits[0]][1])
        if parted.node is None:
            return self._cache(parting)
        return self._described(sides.left.flat, parted, self._exchanged(parting, parted))

    def _sides(self) -> Sides:
        flat = written_out(self.bench, self.left.file, self.left.taken)
        same = (self.left.file, self.left.taken) == (self.right.file, self.right.taken)
        other = flat if same else written_out(self.bench, self.right.file, self.right.taken)
        left, right = self._graph(flat, self.left), self._graph(other, self.right)
        logits = [self._behind(f, self.contract.graph(p.name).port("logits")) for f, p in self._both(flat, other)]
        return Sides(
            left=left,
            right=right,
            left_feeds=self.feeds[0],
            right_feeds=self.feeds[1],
            logits=(logits[0], logits[1]),
            new=self.step.new_tokens,
            total=self.total,
            batch=self._batch(),
            passes=tolerance(self.contract.exactness).passes,
            caches=self._caches(other),
        )

    def _both(self, flat: Flat, other: Flat) -> tuple[tuple[Flat, Phase], tuple[Flat, Phase]]:
        return (flat, self.left), (other, self.right)

    @staticmethod
    def _behind(flat: Flat, port: object) -> str:
        name = getattr(port, "name", "")
        if name not in flat.results:
            raise NoPlace("a graph gives no logits")
        return flat.results[name]

    def _batch(self) -> int:
        for port in self.contract.graph(self.left.name).inputs:
            if "batch" in port.axes and port.name in self.step.fed:
                return self.step.fed[port.name].shape[port.axes.index("batch")]
        return 1

    def _graph(self, flat: Flat, phase: Phase) -> Graph:
        ports = self.contract.graph(phase.name).inputs
        roles = [port.role for port in ports]
        named = {
            port.name: f"{port.role} {roles[:index].count(port.role)}"
            for index, port in enumerate(ports)
            if port.role != "past"
        }
        content = tuple(port.name for port in ports if port.role in CONTENT)
        slots = {slot.past: value for slot in self.contract.slots if (value := self._whole(flat, slot, phase.name))}
        return Graph(flat, phase.file, named, content, slots)

    def _whole(self, flat: Flat, slot: Slot, phase: PhaseName) -> str | None:
        """The value that stands for the whole cache of a slot in a graph."""
        if phase == "decode" and slot.kind != "self-attention" and slot.carry == "hold":
            return slot.past
        name = slot.present if phase == "decode" else slot.filled_by
        value = flat.results.get(name or "")
        while value is not None and (node := flat.producers.get(value)) is not None and node.op == "Identity":
            value = str(node.proto.input[0])
        return value

    def _caches(self, other: Flat) -> Mapping[str, tuple[str, Take]]:
        """The pasts that were fed, each with the value of the other run that begins with the same entries."""
        found: dict[str, tuple[str, Take]] = {}
        for slot in self.contract.growing if self.step.past_length else ():
            value, seen = self._whole(other, slot, self.right.name), self.step.fed.get(slot.past)
            if self.left.name == "decode" and value in other.producers and seen is not None and value is not None:
                at = slot.axes.index("past")
                rules: Take = [None] * len(slot.axes)
                rules[at] = [1, 0, seen.shape[at]]
                found[slot.past] = (value, rules)
        return found

    def _exchanged(self, parting: Parting, parted: Parted) -> tuple[str, str] | None:
        """Where a past goes into the node: that past, and the one that holds the entries which belong there."""
        caches = parting.sides.caches
        past = next((name for name in (parted.node.reads if parted.node else ()) if name in caches), None)
        if past is None:
            return None
        holders = parting.holders(parted.value, caches[past][1])
        return None if past in holders or not holders else (past, holders[0])

    def _described(self, flat: Flat, parted: Parted, exchanged: tuple[str, str] | None) -> Place:
        node = parted.node
        assert node is not None  # noqa: S101 - asked only where there is one
        off = f"off by {parted.relative:g} of its spread"
        if parted.relative < 0:
            off = "not finite alike"
        elif parted.relative > MOST_TOLD:
            off = "another number, where the other run has one and the same throughout"
        root = flat.label(parted.root) if parted.root is not None else None
        blame: Blame = "graph" if parted.sudden or root is not None else "precision"
        if exchanged is not None:
            words = f"{exchanged[0]} does not hold the entries that belong here, {exchanged[1]} does"
        elif root is not None and parted.numbers is not None and parted.numbers[0] != parted.numbers[1]:
            got, wanted = parted.numbers
            words = f"{root} is {got} where the run without a cache has {wanted}: put right, the logits are right"
        elif root is not None:
            what = "" if parted.root == parted.value else f"{root} "
            words = f"what it makes is {off}; with {what}put right, the logits are right"
        elif blame == "graph":
            words = f"what it makes is {off}, and not there alone"
        else:
            words = f"no node stands out: differences grow from node to node, here {off}"
        words = words.replace("with put right", "put right")
        lines = []
        same = [flat.label(name) for name in parted.equal if exchanged is None or name != exchanged[0]]
        if same:
            lines = [f"{' and '.join(same)} {'go' if len(same) > 1 else 'goes'} in, the same as in the other run"]
        if parted.compared < parted.values:
            held = f"{parted.compared} of {parted.values} values could be held against the other run"
            lines.append(f"{held}, so what is wrong may stand before")
        seen = {flat.label(name): self._fed(flat, name) for name in node.proto.input if name}
        return Place(
            node=node_of(node),
            scope=scope_of(node),
            layer=layer_in(node, layers(self.contract)),
            shapes={name: one for name, one in seen.items() if one is not None},
            provenance=tuple(lines),
            frozen_by=None,
            blame=blame,
            words=words,
        )

    def _fed(self, flat: Flat, name: str) -> Seen | None:
        return self.step.fed.get(name) if name not in flat.producers else None

    def _cache(self, parting: Parting) -> Place:
        """The cache that was fed is wrong already: which slots, and whether they hold what belongs to others."""
        wrong = parting.differing_caches()
        caches = parting.sides.caches
        holders = [(name, parting.holders(name, caches[name][1])) for name in wrong[:2]]
        lines = [f"the entries that belong into {name} are in {found[0]}" for name, found in holders if found]
        returned = f", as step {self.before.step} returned it" if self.before else ""
        slot = next((slot for slot in self.contract.slots if slot.past == wrong[0]), None)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        words = f"the past fed as {wrong[0]}{more} is not what the run without a cache keeps{returned}"
        return Place(
            node=None,
            scope="",
            layer=slot.layer if slot else None,
            shapes={name: self.step.fed[name] for name in wrong[:4]},
            provenance=tuple(lines),
            frozen_by=None,
            blame="graph",
            words=words,
        )

    def _outside(self, take: Take) -> Place:
        """Nothing differs with optimisations off: from which level on, and on which provider?"""
        names = [port.name for p in (self.left, self.right) if (port := self.contract.graph(p.name).port("logits"))]
        for level in LEVELS:
            if self._wrong(names, level, None, take):
                if self.provider != "CPUExecutionProvider" and not self._wrong(
                    names, level, "CPUExecutionProvider", take
                ):
                    return _nowhere("kernel", f"the same step is right on the CPU, and wrong on {self.provider}")
                return _nowhere(
                    "optimisation", f"the step is wrong from optimisation level {level!r} on, right below it"
                )
        raise NoPlace("run alone, the step gives the logits of the run without a cache")

    def _wrong(self, names: Sequence[str], level: str, provider: str | None, take: Take) -> bool:
        left, right = (
            {"path": str(phase.file.absolute()), "root": None, "feeds": str(feeds), "level": at, "provider": provider}
            for phase, feeds, at in ((self.left, self.feeds[0], level), (self.right, self.feeds[1], "off"))
        )
        told = self.bench.compare(left, right, [(names[0], names[-1], take)])[0]
        return told is None or not 0 <= told["relative"] <= tolerance(self.contract.exactness).passes


def _nowhere(blame: Blame, words: str) -> Place:
    """No node of the graph is at fault."""
    return Place(None, "", None, {}, (), None, blame, words)
