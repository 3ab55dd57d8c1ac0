"""The two files that a program of a loop reads: `contract.json`, what the loop does, and `vectors.json`, runs to try.

The contract has the plan (`plan.py`) as data, with what a program compares with the model when it opens it and the
token ids of its configs. docs/loops.md describes both.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from kvdoctor._version import __version__
from kvdoctor.addons.loops.plan import MANY, CallPlan, Dim, LoopPlan
from kvdoctor.addons.loops.vectors import LoopTarget, Vector, list_calls, list_runs
from kvdoctor.analysis.configs import SideCars, decoder_config
from kvdoctor.records import to_plain

CONTRACT_FILE, VECTORS_FILE = "contract.json", "vectors.json"
CONTRACT_SCHEMA, VECTORS_SCHEMA = "kvdoctor/loop/4", "kvdoctor/loop-vectors/2"
FACTS = ("one_token", "batch", "capacity_is_chosen", "pads", "chunks", "rewinds", "reorders")
"""What the contract says as the plan has it."""
WIDTH = 200
MOST_IDS = 4096
"""More than any list of suppressed ids has."""


def make_contract(target: LoopTarget, plan: LoopPlan) -> dict[str, Any]:
    """The content of `contract.json` for a plan of the target's model.

    `calls` has those of each phase in order. `zeros` are the values before the first call, `cut` those that a rewind
    cuts along an axis, `rows` those that a reorder changes, where a sequence has `each` entries of the axis.
    """
    phases = {"encode": plan.encode, "prefill": plan.prefill, "decode": plan.decode}
    return {
        "schema": CONTRACT_SCHEMA,
        "tool": {"name": "kvdoctor", "version": __version__},
        "model": plan.model,
        "stack": target.stack,
        "layout": plan.layout,
        "files": [_describe_file(file, target, plan) for file in plan.files],
        "calls": {name: list(_describe_calls(call, plan)) for name, call in phases.items()},
        "zeros": [
            {"value": one.value, "dtype": one.dtype, "dims": list(one.zeros)}
            for one in plan.slots
            if one.zeros is not None
        ],
        "cut": [{"value": one.value, "axis": one.length_axis, "each": 1} for one in plan.slots if one.rewinds == "cut"],
        "rows": [{"value": value, "axis": axis, "each": each} for value, axis, each in _list_rows(plan)],
        "heads": next((slot.heads for slot in plan.slots if slot.heads > 1), 1),
        "source": _describe_given(plan),
        "vocabulary": plan.vocabulary or MANY,
        "context_limit": plan.context_limit or MANY,
        "longest": plan.longest or plan.context_limit or MANY,
        **{name: getattr(plan, name) for name in FACTS},
        "placeholders": list(plan.placeholders),
        "generation": find_generation_ids(target.side_cars, plan),
    }


def _list_rows(plan: LoopPlan) -> Iterator[tuple[str, int, int]]:
    """What has an axis of sequences: the value, the axis, and the entries of a sequence there."""
    for slot in plan.slots:
        if slot.batch_axis is not None:
            yield slot.value, slot.batch_axis, slot.heads
    for one in plan.decode.inputs:
        if one.value is not None and not one.value.startswith("embed ") and one.batch_axis is not None:
            yield one.value, one.batch_axis, 1


def _describe_given(plan: LoopPlan) -> dict[str, Any] | None:
    """What the caller gives before the prompts; `masked`: whether a mask may come with it."""
    if (source := plan.source) is None:
        return None
    masked = any(one.copy == "mask" for call in plan.calls for one in call.inputs)
    axes = {"batch_axis": source.batch_axis, "length_axis": plan.source_axis}
    return {"dtype": source.dtype, "dims": list(source.dims), **axes, "masked": masked}


def _describe_calls(call: CallPlan | None, plan: LoopPlan) -> Iterator[dict[str, Any]]:
    """A call, after that of the embed graph where it takes embeddings."""
    if call is None:
        return
    if plan.embed is not None and any((one.value or "").startswith("embed ") for one in call.inputs):
        yield _describe_call(plan.embed)
    yield _describe_call(call)


def _describe_call(call: CallPlan) -> dict[str, Any]:
    """A call as data: `values` names what an input is fed, `made` has the inputs that are made for the call."""
    values = {one.name: one.value for one in call.inputs if one.value is not None}
    return {
        "file": call.file,
        "values": values | {past: f"cache {past}" for past in call.pasts},
        "made": [to_plain(one) for one in call.inputs if one.value is None],
        "outputs": list(call.outputs),
        "logits": call.logits,
        "logits_type": call.logits_type,
        "logits_dims": call.logits_dims and list(call.logits_dims),
        "takes": [to_plain(take) for take in call.takes],
        "sizes": {name: to_plain(found) for name, found in call.sizes.items()},
    }


def _describe_file(file: str, target: LoopTarget, plan: LoopPlan) -> dict[str, Any]:
    """What a session of the file must have: its inputs, -1 for a size that is free, and the outputs that are used."""
    calls = [call for call in plan.calls if call.file == file]
    pasts = {past for call in calls for past in call.pasts}
    taken: dict[str, tuple[str, tuple[Dim, ...]]] = {
        one.name: (one.dtype, one.dims) for call in calls for one in call.inputs
    }
    taken |= {slot.past: (slot.dtype, slot.dims) for slot in plan.slots if slot.past in pasts}
    return {
        "file": file,
        "external": list(target.external.get(file, ())),
        "inputs": {
            name: {"dtype": dtype, "shape": [dim if isinstance(dim, int) else -1 for dim in dims]}
            for name, (dtype, dims) in taken.items()
        },
        "outputs": list(dict.fromkeys(name for call in calls for name in call.outputs)),
    }


def find_generation_ids(configs: SideCars, plan: LoopPlan) -> dict[str, Any]:
    """The ids of generation_config.json, else of config.json: where a text begins and ends, and what is suppressed.

    `forced` are pairs of a position, counted from the first token of the prompt, and the id there.
    """
    parts = (configs.generation, configs.config, decoder_config(configs.config))

    def ids(key: str) -> list[int]:
        for part in parts:
            given = part.get(key)
            listed = given if isinstance(given, list) else [given]
            if given is not None and len(listed) <= MOST_IDS:
                return [one for one in listed if _is_token(one, plan)]
        return []

    forced = [pair for part in parts for pair in _list_forced(part, plan)]
    return {
        "start": (ids("decoder_start_token_id") if plan.source is not None else []) or ids("bos_token_id"),
        "end": ids("eos_token_id"),
        "suppress": ids("suppress_tokens"),
        "begin_suppress": ids("begin_suppress_tokens"),
        "forced": [list(pair) for pair in sorted(dict(reversed(forced)).items())],
    }


def _list_forced(part: Mapping[str, Any], plan: LoopPlan) -> Iterator[tuple[int, int]]:
    """Each position with the id that a config forces there."""
    pairs = part.get("forced_decoder_ids")
    for pair in (pairs if isinstance(pairs, list) else [])[:MOST_IDS]:
        if isinstance(pair, list) and len(pair) == 2 and _is_token(pair[1], plan) and type(pair[0]) is int:
            yield pair[0], pair[1]
    if _is_token(first := part.get("forced_bos_token_id"), plan):
        yield 1, first


def _is_token(value: Any, plan: LoopPlan) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < (plan.vocabulary or 1 << 31)


def make_vectors(vectors: tuple[Vector, ...]) -> dict[str, Any]:
    """The content of `vectors.json`: runs that a program plays, with the tokens that it must find.

    A run is a list of calls of the decoder. Where one returns logits, `expect` has the likeliest token of each
    sequence; -1 where several are right.
    """
    return {
        "schema": VECTORS_SCHEMA,
        "runs": [{"name": name, "calls": list(list_calls(name, vector))} for name, vector in list_runs(vectors)],
    }


def as_text(document: dict[str, Any]) -> str:
    """A document as JSON text in ASCII: what has room on a line stands on one, so that files can be compared."""
    return _lay_out(document, "") + "\n"


def _lay_out(value: Any, indent: str) -> str:
    short = json.dumps(value)
    if not isinstance(value, (dict, list)) or len(indent) + len(short) <= WIDTH:
        return short
    named = isinstance(value, dict)
    items = value.items() if isinstance(value, dict) else ((None, one) for one in value)
    inner = indent + "  "
    lines = [inner + (f"{json.dumps(name)}: " if named else "") + _lay_out(one, inner) for name, one in items]
    first, last = "{}" if named else "[]"
    return f"{first}\n" + ",\n".join(lines) + f"\n{indent}{last}"
