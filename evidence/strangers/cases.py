"""The cases: a decoder of a family, right or with one mistake that does harm; written with its truth."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from .decoder import Decoder, build
from .design import Design
from .families import FAMILIES, Family
from .faults import Fault, drawn
from .outcome import Expected
from .prober import FAILED, Truth, probe

MOST, LEAST = 1e-3, 0.05
"""In standard deviations of the logits: a right decoder stays below the first, a mistake does more than the second."""
STRIKES = {
    "leftpad": ("padding-changes-logits",),
    "chunk": ("chunk-differs", "chunk-fails"),
    "batch": ("batch-rows-interact",),
    "long": ("wrong-at-lengths", "context-limit-fails"),
}
"""The findings that say in which uses alone a decoder is wrong."""


@dataclass(frozen=True)
class Case:
    """A decoder, what is expected of a step-test, and what was measured."""

    name: str
    decoder: Decoder
    expected: Expected
    truth: Truth

    def write(self, folder: Path) -> None:
        """Write the model, what is expected of a step-test, and the truth."""
        self.decoder.write(folder)
        design = self.decoder.design
        plain = Design(design.name, seed=design.seed)
        fields = {key: value for key, value in vars(design).items() if value != getattr(plain, key)}
        said = {"harm": self.truth.harm, "own": self.truth.own, "design": fields}
        for name, value in (("expected", asdict(self.expected)), ("truth", said)):
            (folder / f"{name}.json").write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")


def right(family: str, number: int = 0) -> Case:
    """An instance of a family.

    Raises:
        ValueError: by the prober it is not right, which is a mistake of this program.
    """
    design = FAMILIES[family].instance(family, number)
    decoder = build(design)
    truth = probe(decoder, decoder)
    if truth.error or max(truth.harm.values()) > MOST:
        raise ValueError(f"{design.name} is not right: {truth}")
    return Case(design.name, decoder, _expected(FAMILIES[family], design), truth)


def faulty(family: str, number: int, count: int) -> Iterator[Case]:
    """So many faulty decoders of an instance, each with a mistake that shows in some use.

    A mistake that the one call of the decoder has too cannot be seen without the right one, and is left out; so is
    one by which no use runs.
    """
    design = FAMILIES[family].instance(family, number)
    whole = build(design)
    for fault in islice(drawn(whole), 4 * count):
        decoder = build(design, fault)
        truth = probe(decoder, whole)
        harm = {use: min(size, truth.own[use]) for use, size in truth.harm.items()}
        harmed = [use for use, size in harm.items() if size > LEAST]
        if truth.error or not harmed or min(truth.harm.values()) >= FAILED:
            continue
        expected = _expected(FAMILIES[family], design, fault, harmed)
        yield Case(f"{design.name}--{fault.slug}", decoder, expected, truth)
        count -= 1
        if not count:
            return


def _expected(family: Family, design: Design, fault: Fault | None = None, harmed: list[str] | None = None) -> Expected:
    frozen = design.one_token or design.batch_one
    if fault is None:
        return Expected(unclear=family.unclear, frozen=frozen)
    struck = next((names for word, names in STRIKES.items() if all(word in use for use in harmed or [])), ())
    branch = () if design.files == "one" else ("branches-disagree",)
    names = tuple(dict.fromkeys([*fault.names, *struck, *branch]))
    return Expected(fault.kind, names, tuple(harmed or []), family.unclear, frozen)
