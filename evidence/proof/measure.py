"""Proofs of models: of the exports and fixtures, of injected faults, and of decoders that are drawn at random."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from evidence.faults.base_models import BASES
from evidence.faults.registry import load
from evidence.strangers.cases import LEAST, MOST
from evidence.strangers.decoder import Decoder, build
from evidence.strangers.families import FAMILIES
from evidence.strangers.faults import drawn
from evidence.strangers.prober import FAILED, probe
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.analysis.proof import Proof
from kvdoctor.analysis.proof.prove import prove

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
COMMITTED = {
    **{name: name for name in ("gpt2", "llama-gqa", "t5", "whisper")},
    **dict.fromkeys(("marian", "marian-pair"), "marian-4.57.6"),
    **{f"{name}-pair": name for name in ("t5", "whisper")},
}
"""The folders of the bases of faults that need no exporter."""
TOKENS = {"long": 28, "longprefill": 27, "chunk": 14, "batchchunk": 10, "plain": 9, "one": 6, "batch": 8}
"""The tokens of each use of the prober."""
OTHER_ORDER = ("exchanged", "one_place_late", "in_reverse")
"""Faults that return presents in another order: the contract follows the graph, and pairs them as the graph does."""


@dataclass(frozen=True)
class Proved:
    """A stack, its proof, the nodes of its decode graph, and the seconds of the processor that the proof took."""

    name: str
    stack: str
    proof: Proof | None
    nodes: int
    seconds: float

    @property
    def holds(self) -> bool:
        return self.proof is not None and self.proof.holds


def prove_folder(folder: Path, name: str) -> Iterator[Proved]:
    """The proof of each stack of a folder."""
    opened = open_folder(str(folder))
    for stack in opened.stacks:
        contract, flow = read_contract(stack, opened.side_cars), stack.main.dataflow
        begin = time.process_time()
        proof = prove(stack, contract)
        seconds = time.process_time() - begin
        yield Proved(name, stack.name, proof, len(flow.flow.nodes) if flow else 0, seconds)


def prove_faults(scratch: Path) -> Iterator[tuple[str, Proved]]:
    """The proof of each injected fault in each committed export, with the name of the check that finds it."""
    for name, fault in load().items():
        for base in (base for base in fault.bases if base in COMMITTED):
            export = BASES[base].read(EXPORTS / COMMITTED[base])
            fault.harm(export)
            for one in prove_folder(export.write(scratch / f"{name}-{base}"), f"{name} in {base}"):
                yield fault.check, one


@dataclass(frozen=True)
class Drawn:
    """A random decoder, its proof, and the uses whose logits differ from its own call without a cache."""

    proved: Proved
    faulty: bool
    differing: tuple[str, ...] = ()


def prove_drawn(family: str, number: int, faults: int, scratch: Path) -> Iterator[Drawn]:
    """A right decoder and so many faulty ones; those that are proved are run in every use that the proof covers."""
    whole = build(FAMILIES[family].instance(family, number))
    yield Drawn(_prove(whole, scratch / "right", f"{family} {number}"), False)
    for at, fault in enumerate(islice(drawn(whole), faults)):
        faulty = build(whole.design, fault)
        proved = _prove(faulty, scratch / str(at), f"{family} {number} {fault.slug}")
        ordered = not any(order in fault.slug for order in OTHER_ORDER)
        yield Drawn(proved, True, tuple(_list_differing(proved, faulty, whole)) if proved.holds and ordered else ())


def _prove(decoder: Decoder, folder: Path, name: str) -> Proved:
    folder.mkdir(parents=True)
    decoder.write(folder)
    found = list(prove_folder(folder, name))
    return next((one for one in found if one.holds), found[0] if found else Proved(name, "", None, 0, 0.0))


def _list_differing(proved: Proved, decoder: Decoder, whole: Decoder) -> Iterator[str]:
    """The uses that the proof covers and that differ from the decoder's own call without a cache.

    Logits that are no numbers in all calls are no difference between them.
    """
    assert proved.proof is not None
    for use, size in probe(decoder, whole).own.items():
        covered = "leftpad" not in use and not (proved.proof.single and "chunk" in use)
        reached = proved.proof.up_to is None or proved.proof.up_to >= TOKENS.get(use, 0)
        if covered and reached and MOST < size < FAILED:
            yield f"{use}: {size:.2g}" + ("" if size > LEAST else " (small)")
