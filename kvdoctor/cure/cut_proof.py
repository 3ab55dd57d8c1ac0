"""Proof for an encoder that was cut out of a first step: its parts, one after the other, give what the whole gave.

The loops of the source cannot be held against those of the new files: the source's first step takes what its encoder
takes. So one call of the whole is made, and the same tokens and features are given to the parts.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import CacheContract, Dim
from kvdoctor.cure.converting import Fitted
from kvdoctor.cure.surgery import Surgery
from kvdoctor.errors import WorkerDied
from kvdoctor.graph import Declared, GraphView
from kvdoctor.kept_calls import save_call
from kvdoctor.layouts import Cut
from kvdoctor.layouts.encoders import RESULT, STATES
from kvdoctor.onnx_schema import ValueInfoProto
from kvdoctor.report.document import Proof
from kvdoctor.skeleton import read_skeleton
from kvdoctor.tolerances import tolerance

if TYPE_CHECKING:
    from kvdoctor.calls import Array

BATCH, NEW, SOURCE, PADDED = 2, 3, 7, 2
"""Sequences, new tokens, length of an encoder's input where the graph leaves it open, and how much of it is padding."""

INTEGERS = ("int64", "int32")


def prove_cut(surgery: Surgery, stack: str, one: Fitted, source: Path, files: tuple[str, str]) -> Iterator[Proof]:
    """Hold both new files, the encoder and what decodes first, against the first step of the source, one call each."""
    cut, contract = one.made.cut, one.contract
    assert cut is not None  # noqa: S101 - asked only where an encoder was cut out
    model = read_skeleton(source, located=True).model
    if cut.states not in {value.name for value in model.graph.output}:
        model.graph.output.append(ValueInfoProto(name=cut.states))
    whole = surgery.scratch / "whole.onnx"
    whole.write_bytes(model.SerializeToString())
    given = _made_up(GraphView(model).inputs, contract, cut)
    right = _side(surgery, whole, given, source.parent)
    logits = contract.graph("prefill").port("logits")
    encoder = {name.removeprefix("input."): array for name, array in given.items()}
    left = _side(surgery, surgery.at / files[0], encoder)
    claim = f"{files[0]} gives what the first step of the source made inside"
    yield _held(surgery, Proof(stack, claim, False), contract, {"pairs": [[RESULT, cut.states, []]]}, (left, right))
    if logits is None:
        return
    view = GraphView(read_skeleton(surgery.at / files[1]).model)
    left = _side(surgery, surgery.at / files[1], _for_decoder(view, contract, given, cut))
    job = {"pairs": [["logits", logits.name, []]], "inject": [[STATES, cut.states, []]]}
    claim = "the logits of the first step are those of the source"
    yield _held(surgery, Proof(stack, claim, False), contract, job, (left, right))


def _held(
    surgery: Surgery, claim: Proof, contract: CacheContract, job: dict[str, Any], sides: tuple[Any, Any]
) -> Proof:
    job = {"trial": "compare", "inject": [], **job, "left": sides[0], "right": sides[1]}
    try:
        told = surgery.runtime.trial({**job, "provider": surgery.options.provider})
    except WorkerDied as death:
        told = {"error": death.how}
    pair = next(iter(told.get("pairs", ())), None)
    if pair is None:
        return Proof(
            claim.stack, claim.claim, False, f"could not be compared: {told.get('error', 'another shape')[:200]}"
        )
    apart = pair["relative"]
    text = "bit for bit" if apart == 0 else f"within {apart:.1e} of their spread" if apart > 0 else "not finite"
    return Proof(claim.stack, claim.claim, 0 <= apart <= tolerance(contract.exactness).passes, text)


def _side(surgery: Surgery, path: Path, feeds: "Mapping[str, Array]", root: Path | None = None) -> dict[str, Any]:
    """One model and its call, as the worker reads it."""
    call = surgery.scratch / f"call-{path.stem}.npz"
    save_call(call, feeds)
    place = None if root is None else str(root.absolute())
    return {"path": str(path.absolute()), "root": place, "feeds": str(call), "level": "all"}


def _made_up(ports: dict[str, Declared], contract: CacheContract, cut: Cut) -> "dict[str, Array]":
    """A call of the whole: tokens, masks of ones but for the end of the second sequence, features of noise."""
    import numpy as np

    rng, words = np.random.default_rng(0), max(contract.vocabulary or 8, 8)
    later = {port.name: port.role for port in contract.graph("decode").inputs}
    feeds: dict[str, Array] = {}
    for name, port in ports.items():
        shape = _sized(port.shape or (), NEW if name not in cut.inputs else SOURCE)
        if "mask" in name or later.get(name) == "encoder_mask":
            feeds[name] = np.ones(shape, np.int64)
            feeds[name][1:, SOURCE - PADDED :] = 0
        elif port.dtype in INTEGERS:
            feeds[name] = rng.integers(words // 4, words - words // 4, shape).astype(port.dtype)
        else:
            feeds[name] = rng.standard_normal(shape).astype(np.float16 if port.dtype == "float16" else np.float32)
    return feeds


def _sized(shape: tuple[Dim, ...], length: int) -> tuple[int, ...]:
    sizes = [int(str(dim)) if str(dim).isdigit() else length for dim in shape]
    return (BATCH, *sizes[1:])


def _for_decoder(
    view: GraphView, contract: CacheContract, given: "Mapping[str, Array]", cut: Cut
) -> "dict[str, Array]":
    """The same call for what decodes first; the encoder's states are put in from the whole."""
    import numpy as np

    later = {port.name: port.role for port in contract.graph("decode").inputs}
    feeds: dict[str, Array] = {"use_cache_branch": np.array([False])}
    for name, array in given.items():
        if later.get(name) == "encoder_mask":
            feeds["encoder_attention_mask"] = array
        elif name not in cut.only:
            feeds["input_ids"] = array
    for name, port in view.inputs.items():
        if name.startswith("past_key_values."):
            sizes = [dim if isinstance(dim, int) else 0 for dim in port.shape or ()]
            feeds[name] = np.zeros((BATCH, *sizes[1:]), np.float16 if port.dtype == "float16" else np.float32)
    return feeds
