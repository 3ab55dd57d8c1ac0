"""Decoders that kvdoctor has never seen: each is proved right or wrong by a loop by hand, and then diagnosed."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from support.sampling import sampled

from evidence.unseen.layouts import FLOAT16, VOCABULARY, Decoder, Layout, Sheet, encoder
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

OPTIONS = Options(consumer="held")
OPTIMUM, COUNTED = Layout(), Layout("in{n}", "out{n}", "tokens", "scores")
AFFIX = Layout("kv_{layer}_{part}", "kv_{layer}_{part}_out", "ids", "y")
BUFFER = Layout("buf_{layer}_{part}", "new_buf_{layer}_{part}", order="bnch", place="arange", position="cache_position")
SCATTER, WHERE, ONE_HOT = (replace(BUFFER, writes=(write, write)) for write in ("scatter", "where", "one-hot"))
RING, TRIM = replace(BUFFER, order="bnrh", writes=("ring",) * 2), replace(AFFIX, place="rows", writes=("trim",) * 2)
SHIFT = replace(BUFFER, order="bnrh", writes=("shift",) * 2, place="number", position="past_length")
LATENT = Layout("{part}_{layer}", "{part}_{layer}_next", layers=("latent", "latent"), place="rows")
LINEAR = Layout("S{layer}", "S{layer}_next", layers=("linear", "linear"), place="number", position="offset")
MIXED = replace(OPTIMUM, place="rows", config={"model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": 5})
CROSS = replace(AFFIX, also=("cross",))
STACK = Layout("mem", "mem_new", "x", "y", order="LPbnph")
STACK_ORDERS = ("bLPpnh", "pbLPnh", "LPbnhp", "bpLPnh", "PLnphb")

HEALTHY = {
    "optimum names": OPTIMUM,
    "anonymous": COUNTED,
    "affix": AFFIX,
    "tokens before heads": replace(COUNTED, order="bpnh"),
    "tokens before the batch": replace(AFFIX, order="pbnh"),
    "tokens last, n_past": replace(COUNTED, order="bnhp", place="number", position="n_past"),
    "n_past as a scalar": replace(AFFIX, place="scalar", position="n_past"),
    "float16 cache": replace(COUNTED, dtype=FLOAT16),
    "keys and values fused": replace(COUNTED, order="bpf"),
    "all stacked": STACK,
    **{f"stacked as {order}": replace(STACK, order=order) for order in STACK_ORDERS},
    **{f"turned from {order}": replace(STACK, order=order, also=("turned first",)) for order in STACK_ORDERS},
    "ScatterND": SCATTER,
    "Where, and the count returned": replace(WHERE, place="number", position="past_length", also=("count returned",)),
    "Where": WHERE,
    "one-hot": ONE_HOT,
    "one-hot, anonymous": replace(ONE_HOT, past="arg{n}", present="ret{n}", position="arg9"),
    "a window": TRIM,
    "a window that is shifted": SHIFT,
    "a window in layer 0": replace(MIXED, writes=("trim", "append")),
    "a window in layer 1": replace(MIXED, writes=("append", "trim")),
    "prefix": replace(AFFIX, also=("prefix",)),
    "softmax spelled out": replace(AFFIX, also=("softmax spelled out",)),
    "extra outputs": replace(COUNTED, also=("extra outputs",)),
    "last logits only": replace(COUNTED, also=("last logits only",)),
    "latent": LATENT,
    "int8 with scales": replace(AFFIX, layers=("quantized", "quantized")),
    "linear attention": LINEAR,
    "attention and convolution": replace(COUNTED, layers=("attention", "convolution")),
    "encoder": CROSS,
    "back to front": replace(COUNTED, also=("back to front",)),
}
NAMED = {
    "parts crossed": {"key-value-swapped"},
    "layers crossed": {"layers-swapped"},
    "positions restarted": {"cache-misread", "new-entries-wrong", "positions-not-offset"},
    "mask not offset": {"cache-misread", "mask-not-offset"},
    "past ignored": {"past-ignored"},
    "new lost": {"present-does-not-grow"},
    "new alone": {"present-drops-past"},
    "truncated": {"present-does-not-grow"},
    "wrong dtype": {"cache-dtype-mismatch"},
}
NAMES = {"Optimum": OPTIMUM, "affix": AFFIX, "encoder": CROSS}
CROSSED = {"ScatterND": SCATTER, "Where": WHERE}
FAULTS = [(name, replace(layout, fault=fault)) for name, layout in NAMES.items() for fault in NAMED]
FAULTS += [(name, replace(CROSSED[name], fault=fault)) for name in CROSSED for fault in list(NAMED)[:2]]
FAULTS += [("one-hot", replace(ONE_HOT, fault="parts crossed")), ("latent", replace(LATENT, fault="layers crossed"))]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(OPTIONS.limits) as runtime:
        yield runtime


def run(sheet: Sheet, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(sheet.model().SerializeToString(), options)
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, feeds), strict=True))


def steps(decoder: Decoder, ids: np.ndarray, *ends: int) -> np.ndarray:
    """A decode loop by hand, a step up to each end: the logits of their last tokens, float[steps, vocabulary]."""
    layout, past, logits = decoder.layout, {slot.past: slot.first() for slot in decoder.slots}, []
    if "cross" in layout.also:
        past |= run(encoder(decoder), {"source_ids": np.arange(10, 17)[None]})
    for begin, end in pairwise((0, *ends)):
        row = np.arange(begin, end)
        ways = {"arange": row, "rows": row[None], "number": row[:1], "scalar": row[0]}
        place = {layout.position: np.asarray(ways[layout.place])} if layout.place in ways else {}
        out = run(decoder, {layout.tokens: ids[None, begin:end], **place, **past})
        past |= {slot.past: out[slot.present] for slot in decoder.slots if slot.present}
        logits.append(out[layout.logits].reshape(-1, VOCABULARY)[-1])
    return np.array(logits)


def off(decoder: Decoder, reference: Decoder, prompt: int = 3) -> float:
    """How far the logits of a loop lie from those of one call each, in spreads of the logits."""
    ids, ends = np.random.default_rng(5).integers(10, 40, 9), range(prompt, 10)
    want = np.concatenate([steps(reference, ids, end) for end in ends])
    return float(np.abs(steps(decoder, ids, *ends) - want).max() / want.std())


def diagnosed(decoder: Decoder, folder: Path, runtime: Runtime) -> Report:
    crossed = "cross" in decoder.layout.also
    sheets = {"decoder_model": decoder, "encoder_model": encoder(decoder)} if crossed else {"model": decoder}
    for name, sheet in sheets.items():
        (folder / f"{name}.onnx").write_bytes(sheet.model().SerializeToString())
    if decoder.layout.config:
        types = ["sliding_attention" if write == "trim" else "full_attention" for write in decoder.layout.writes]
        (folder / "config.json").write_text(json.dumps({**decoder.layout.config, "layer_types": types}))
    return step_test(str(folder), OPTIONS, runtime)


def faults(report: Report) -> list[str]:
    return [finding.name for finding in report.findings if finding.severity != "note"]


@pytest.mark.parametrize("name", sampled(HEALTHY, 4))
def test_a_healthy_one_is_healthy(name: str, tmp_path: Path, runtime: Runtime) -> None:
    decoder = Decoder(HEALTHY[name])
    assert off(decoder, decoder) < 1e-4
    report = diagnosed(decoder, tmp_path, runtime)
    assert (report.verdict, faults(report)) == ("healthy", [])
    (stack,) = report.stacks
    told = {slot.past: (slot.present, slot.kind, slot.growth, slot.carry, slot.axes) for slot in stack.contract.slots}
    assert told == {slot.past: slot.deal for slot in decoder.slots}


def test_a_ring_of_one_token_a_step_is_healthy_by_histories_and_sessions(tmp_path: Path, runtime: Runtime) -> None:
    decoder = Decoder(RING)
    assert off(decoder, Decoder(TRIM), prompt=1) < 1e-4, "the same weights, and the same window"
    report = diagnosed(decoder, tmp_path, runtime)
    assert (report.verdict, faults(report)) == ("healthy", [])
    (entry,) = (entry for entry in report.not_checked if "the first step takes 1 new token only" in entry.reason)
    assert not entry.essential
    assert "in a fresh session, for each batch row alone, and others after other tokens" in entry.reason


@pytest.mark.parametrize(
    ("name", "layout"), sampled(FAULTS, 6), ids=[f"{layout.fault}, {name}" for name, layout in FAULTS]
)
def test_a_fault_is_one_error_by_its_name(name: str, layout: Layout, tmp_path: Path, runtime: Runtime) -> None:
    decoder = Decoder(layout)
    with pytest.raises(InvalidArgument) if layout.fault == "wrong dtype" else nullcontext():
        assert off(decoder, decoder) > 0.1
    report = diagnosed(decoder, tmp_path, runtime)
    (error,) = faults(report)
    # Where the content of a past leaves by no output, only a dialect says which present was meant.
    lost = layout.fault in ("new lost", "new alone") and name != "Optimum"
    assert error in NAMED[layout.fault] | ({"past-without-present"} if lost else set())
