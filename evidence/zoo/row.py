"""The words in which the tables of the zoo say what is true of an export."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvdoctor.contract import Carry, Growth, SlotKind
from kvdoctor.diagnose.context import Consumer

Exporter = Literal["committed", "optimum", "transformers", "genai"]
Variant = Literal["exported", "int8", "fp16", "onnxslim", "ort-basic", "ort-all"]
Told = frozenset[tuple[str, str, str]]
"""Findings as (check, stack, severity); notes hurt nobody and are left out."""

CONSUMERS: tuple[Consumer, ...] = ("plain", "held")
FLOAT = 1e-4
"""What float32 may differ by with and without the cache, as a fraction of the logits' spread: 1e-6 is usual."""
HALF = 2e-2
"""The same for float16, which keeps 11 bits."""


@dataclass(frozen=True, order=True)
class Slots:
    """Slots of one kind: how many, what a step does to their length, and what a right loop does with them."""

    count: int
    kind: SlotKind
    growth: Growth
    carry: Carry = "feed-back"

    def __str__(self) -> str:
        return f"{self.count} {self.kind} ({self.growth})"


@dataclass(frozen=True)
class Stack:
    """Graphs that decode together, and the cache contract that they keep.

    Attributes:
        name: As kvdoctor names it: decoder, merged or pair.
        layout: The layout in kvdoctor's words.
        first_step: What the first call gets: a past of length 0, the branch without past, the graph without past.
        slots: The cache.
    """

    name: str
    layout: str
    first_step: str
    slots: tuple[Slots, ...]

    @classmethod
    def of(cls, name: str, layout: str, first_step: str, slots: Iterable[Slots]) -> "Stack":
        """A stack whose slots are in the order in which two stacks are compared."""
        return cls(name, layout, first_step, tuple(sorted(slots, key=lambda each: (each.kind, each.growth))))


@dataclass(frozen=True)
class Fault:
    """Something that is truly wrong with an export, in one line.

    Attributes:
        check: Name of the check that must find it.
        stack: Name of the stack that has it.
        why: The reason, for the reader.
        severity: Severity it must have.
        consumers: The loops it hurts; for another one it is at most a note.
    """

    check: str
    stack: str
    why: str
    severity: Literal["error", "warning"] = "error"
    consumers: tuple[Consumer, ...] = CONSUMERS


@dataclass(frozen=True)
class Row:
    """One export and the whole truth about it.

    Attributes:
        exporter: Which script makes it; `committed` ones lie in fixtures/exports.
        architecture: Name by which that script knows it.
        stacks: The stacks it holds.
        variant: What has been done to it since.
        faults: All that is wrong with it. Nothing else may be found.
        incomplete: Why it cannot be decided whether it is healthy; empty for nearly all.
        not_applicable: Why it is no decoder of tokens; empty for nearly all.
        noisy: Whether its int8 arithmetic makes noise, which depends on the processor. On tiny random weights it can
            drown the cache and the warnings: such a row may be incomplete instead of healthy, never unhealthy.
        largest: Largest difference with and without the cache, as a fraction of the logits' spread.
    """

    exporter: Exporter
    architecture: str
    stacks: tuple[Stack, ...]
    variant: Variant = "exported"
    faults: tuple[Fault, ...] = ()
    incomplete: str = ""
    not_applicable: str = ""
    noisy: bool = False
    largest: float = FLOAT

    def __str__(self) -> str:
        return f"{self.exporter}-{self.architecture}-{self.variant}"

    def told(self, consumer: Consumer) -> Told:
        """All errors and warnings that are true for a consumer."""
        return frozenset((each.check, each.stack, each.severity) for each in self.faults if consumer in each.consumers)

    def allows(self, consumer: Consumer, seen: Told) -> bool:
        """Whether findings are the true ones: all of them, or all errors where noise may hide the warnings."""
        told = self.told(consumer)
        must = {each for each in told if each[2] == "error"} if self.noisy else told
        return must <= seen <= told

    def verdicts(self, consumer: Consumer) -> tuple[str, ...]:
        """The verdicts that are right for a consumer: one, or two where noise decides."""
        if any(severity == "error" for _, _, severity in self.told(consumer)):
            return ("unhealthy",)
        if self.incomplete or self.not_applicable:
            return ("incomplete",) if self.incomplete else ("not-applicable",)
        return ("healthy", "incomplete") if self.noisy else ("healthy",)


def keys_and_values(layers: int = 2, growth: Growth = "grow") -> Slots:
    """The self-attention cache of some layers: a key and a value each."""
    return Slots(2 * layers, "self-attention", growth)


def cross_cache(layers: int = 2) -> Slots:
    """The cross-attention cache of some layers: computed once from the encoder, held by a right loop."""
    return Slots(2 * layers, "cross-attention", "constant", "hold")
