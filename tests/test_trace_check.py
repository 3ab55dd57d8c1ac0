"""`--trace`: loops written by hand over real exports, right ones and ones with one mistake, which must be named."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from support.loops import EXPORTS, Change, Feeds, Loop, as_lines, decoder_only, pair, seq2seq, taking_back
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor.addons.traces.check import TraceCheck, compare_trace, find_stacks
from kvdoctor.addons.traces.runs import read_recording
from kvdoctor.contract import CacheContract, Port
from kvdoctor.diagnose.inspection import inspect

MERGED = ("marian-4.46.3", "marian-4.57.6", "t5", "whisper")
ALONE = ("gpt2", "llama-gqa")
SHAPES, SMALL, EVERYTHING = 0, 16, 10**9
"""Up to how many elements a trace tells the values of a tensor."""


@cache
def contracts(export: str) -> dict[str, CacheContract]:
    return {s.name: s.contract for s in inspect(str(EXPORTS / export)).stacks if s.contract is not None}


def held(loop: Loop, export: str, tmp_path: Path, data: int) -> tuple[str, TraceCheck]:
    """What holding a loop against the contract of an export brings, with the stack that it was found to call."""
    file = tmp_path / "loop.jsonl"
    file.write_text(as_lines(loop, data), encoding="utf-8")
    trace = read_recording(str(file)).first
    (stack,) = find_stacks(trace, contracts(export), str(file))
    return stack, compare_trace(trace, contracts(export)[stack])


RIGHT: dict[str, tuple[str, str, Callable[[], Loop]]] = {
    **{f"{e} merged": (e, "merged", partial(seq2seq, EXPORTS / e)) for e in MERGED},
    **{f"{e} merged, batch 2": (e, "merged", partial(seq2seq, EXPORTS / e, batch=2)) for e in MERGED},
    **{f"{e} pair": (e, "pair", partial(pair, EXPORTS / e)) for e in MERGED},
    **{f"{e}": (e, "decoder", partial(decoder_only, EXPORTS / e)) for e in ALONE},
    **{f"{e}, batch 3": (e, "decoder", partial(decoder_only, EXPORTS / e, batch=3)) for e in ALONE},
}


@pytest.mark.parametrize("data", [SHAPES, SMALL, EVERYTHING], ids=["shapes", "small", "everything"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_breaks_nothing(name: str, data: int, tmp_path: Path) -> None:
    export, stack, run = RIGHT[name]
    loop = run()
    found, result = held(loop, export, tmp_path, data)
    assert (found, result.breaks, result.steps, result.sequences) == (stack, (), len(loop.calls), 1)
    assert bool(result.blind) == (data != EVERYTHING)


@pytest.mark.parametrize("name", RIGHT)
def test_tokens_may_be_taken_back(name: str, tmp_path: Path) -> None:
    export, stack, run = RIGHT[name]
    loop = cast("partial[Loop]", run)(change=taking_back)
    found, result = held(loop, export, tmp_path, EVERYTHING)
    assert (found, result.breaks, result.steps, result.sequences) == (stack, (), len(loop.calls), 1)


def beams(slots: str) -> Change:
    """From step 2 on rows of some slots are exchanged, as beam search does with all of them."""
    return at(2, each(slots, lambda n, f, _: f[n][::-1].copy()))


@pytest.mark.parametrize("export", ALONE)
def test_all_slots_or_none_are_reordered(export: str, tmp_path: Path) -> None:
    prompts = at(0, lambda f, loop: loop.calls or f.update(input_ids=np.array([[40, 41, 42], [50, 51, 52]])))
    for slots, broken in (("past", ()), (".key", ("rows-disagree",))):

        def change(number: int, feeds: Feeds, loop: Loop, slots: str = slots) -> None:
            prompts(number, feeds, loop)
            beams(slots)(number, feeds, loop)

        result = held(decoder_only(EXPORTS / export, change, batch=2), export, tmp_path, EVERYTHING)[1]
        assert tuple(found.kind for found in result.breaks) == broken


@pytest.mark.parametrize("export", ALONE)
def test_a_past_of_two_steps_ago_is_called_that(export: str, tmp_path: Path) -> None:
    old = at(3, lambda f, loop: f.update({n: v for n, v in loop.fed(1).items() if "past" in n}))
    (found,) = held(decoder_only(EXPORTS / export, old), export, tmp_path, EVERYTHING)[1].breaks
    assert (found.kind, found.cause.partition(":")[0]) == ("past-stale", "the past of step 1 is fed again, 2 steps old")


@pytest.mark.parametrize("export", ALONE)
def test_a_mask_of_the_shorter_length_tells_it_without_values(export: str, tmp_path: Path) -> None:
    loop = decoder_only(EXPORTS / export, taking_back)
    assert held(loop, export, tmp_path, SHAPES)[1].breaks == ()
    loop.calls[3]["fed"]["attention_mask"] = np.ones((1, 10), np.int64)
    (found,) = held(loop, export, tmp_path, SHAPES)[1].breaks
    assert found.kind == "past-length"


class Mistake(NamedTuple):
    """One mistake: how it is made, the step it is made at, the finding that it must have, an input that must be named.

    `data` says how much of the trace must have values for the mistake to show.
    """

    change: Change
    kind: str
    step: int
    names: str
    says: str = ""
    data: int = SHAPES
    hold: bool = True


def at(step: int, make: Callable[[Feeds, Loop], object]) -> Change:
    """A mistake at one step and all later ones."""

    def change(number: int, feeds: Feeds, loop: Loop) -> None:
        if number >= step:
            make(feeds, loop)

    return change


def put(name: str, value: "Callable[[Feeds, Loop], np.ndarray[Any, Any]]") -> Callable[[Feeds, Loop], object]:
    return lambda feeds, loop: feeds.update({name: value(feeds, loop)})


def each(part: str, value: "Callable[[str, Feeds, Loop], np.ndarray[Any, Any]]") -> Callable[[Feeds, Loop], object]:
    """All inputs with a part in their name."""

    def make(feeds: Feeds, loop: Loop) -> None:
        feeds.update({name: value(name, feeds, loop) for name in list(feeds) if part in name})

    return make


def swap(one: str, other: str) -> Callable[[Feeds, Loop], object]:
    return lambda feeds, _: feeds.update({one: feeds[other], other: feeds[one]})


def mistaken(step: int, names: str, make: Callable[[Feeds, Loop], object], kind: str, *more: Any) -> Mistake:
    """A mistake from a step on."""
    return Mistake(at(step, make), kind, step, names, *more)


def wrong(
    step: int, name: str, value: "Callable[[Feeds, Loop], np.ndarray[Any, Any]]", kind: str, *more: Any
) -> Mistake:
    """A wrong value of one input from a step on."""
    return mistaken(step, name, put(name, value), kind, *more)


def all_ids(feeds: Feeds, loop: Loop) -> None:
    feeds["input_ids"] = np.concatenate([*(c["fed"]["input_ids"][:, -1:] for c in loop.calls), feeds["input_ids"]], 1)


def every_id(feeds: Feeds, loop: Loop) -> None:
    """The same where the prompt has several tokens."""
    feeds["input_ids"] = np.concatenate([loop.fed(-1)["input_ids"], feeds["input_ids"]], 1)


def stale(feeds: Feeds, loop: Loop) -> None:
    """The self-attention cache is never taken from what came back."""
    feeds.update({n: v for n, v in loop.fed(-1).items() if n.startswith("past") and ".encoder." not in n})


SELF, OTHER = "past_key_values.0.decoder.key", "past_key_values.1.decoder.key"
VALUE, CROSS = "past_key_values.0.decoder.value", "past_key_values.0.encoder.key"
IN_MERGED = {
    "no switch": mistaken(0, "use_cache_branch", lambda f, _: f.pop("use_cache_branch"), "input-missing"),
    "switch of another type": wrong(0, "use_cache_branch",
        lambda f, _: f["use_cache_branch"].astype(np.int64), "wrong-type", "int64, not bool"),
    "switch without axis": wrong(0, "use_cache_branch", lambda f, _: f["use_cache_branch"].reshape(()), "wrong-rank"),
    "cached branch at once": wrong(0, "use_cache_branch",
        lambda *_: np.array([True]), "cached-too-early", "on the first step", SMALL),
    "cached branch never": wrong(2, "use_cache_branch",
        lambda *_: np.array([False]), "cached-too-late", "ignores the cache", SMALL),
    "encoder states left out": mistaken(1, "encoder_hidden_states",
        lambda f, _: f.pop("encoder_hidden_states"), "input-missing"),
    "encoder states empty": wrong(1, "encoder_hidden_states",
        lambda f, _: f["encoder_hidden_states"][:, :0], "encoder-missing"),
    "encoder states of another sentence": wrong(2, "encoder_hidden_states",
        lambda f, _: f["encoder_hidden_states"] * 2, "encoder-changes", "the encoder states change", EVERYTHING),
    "encoder states cut": wrong(1, "encoder_hidden_states",
        lambda f, _: f["encoder_hidden_states"][:, :-1], "encoder-changes"),
    "unknown input": wrong(1, "decoder_attention_mask", lambda *_: np.ones((1, 2), np.int64), "input-unknown"),
    "ids of 32 bits": wrong(0, "input_ids", lambda f, _: f["input_ids"].astype(np.int32), "wrong-type"),
    "ids without batch": wrong(1, "input_ids", lambda f, _: f["input_ids"][0], "wrong-rank"),
    "past in half precision": mistaken(1, SELF,
        each("past", lambda n, f, _: f[n].astype(np.float16)), "wrong-type", "float16, not float"),
    "past never renewed": mistaken(2, SELF, stale, "past-stale", "did not grow by the 1 token of that step"),
    "past one short": mistaken(3, SELF,
        each("decoder.", lambda n, f, _: f[n][:, :, 2:]), "past-length", "length 1, where 3 tokens"),
    "past forgotten": mistaken(2, SELF, each("decoder.", lambda n, f, _: f[n][:, :, :0]), "cache-dropped", "length 0"),
    "all ids and the cache": mistaken(1, "input_ids", all_ids, "all-ids-with-cache", "count twice"),
    "placeholder fed back": Mistake(
        lambda *_: None, "placeholder-fed-back", 2, CROSS, "that step 1 returned", SHAPES, hold=False
    ),
    "cross cache empty": mistaken(1, CROSS,
        each("encoder.", lambda n, f, _: f[n][:, :, :0]), "placeholder-fed-back", "no elements"),
    "cross cache cut": mistaken(2, CROSS,
        each("past_key_values.0.encoder.", lambda n, f, _: f[n][:, :, 1:]), "cross-cache-replaced", "shape changes"),
    "cross cache made anew": mistaken(1, CROSS,
        each(".encoder.", lambda n, f, _: np.ones_like(f[n])), "cross-cache-replaced", "values change", EVERYTHING),
    "key and value crossed": mistaken(1, SELF,
        swap(SELF, VALUE), "slots-crossed", f"what belongs to {VALUE}", EVERYTHING),
    "layers crossed": mistaken(1, SELF, swap(SELF, OTHER), "slots-crossed", f"what belongs to {OTHER}", EVERYTHING),
    "self and cross crossed": mistaken(1, SELF, swap(SELF, CROSS), "slots-crossed", "as their shapes show"),
    "past of zeros": mistaken(2, SELF,
        each("decoder.", lambda n, f, _: f[n] * 0), "past-differs", "are not those of", EVERYTHING),
    "two sentences in one cache": wrong(2, "input_ids", lambda f, _: np.tile(f["input_ids"], (2, 1)), "batch-changes"),
}  # fmt: skip

MASK_OF_ENCODER = wrong(1, "encoder_attention_mask",
        lambda f, _: f["encoder_attention_mask"][:, :-2], "encoder-changes")  # fmt: skip


@pytest.mark.parametrize("data", [SHAPES, SMALL, EVERYTHING], ids=["shapes", "small", "everything"])
@pytest.mark.parametrize("name", sampled(IN_MERGED, 2))
@pytest.mark.parametrize("export", MERGED)
def test_a_mistake_in_a_merged_loop_is_named(export: str, name: str, data: int, tmp_path: Path) -> None:
    mistake = IN_MERGED[name]
    named(mistake, seq2seq(EXPORTS / export, mistake.change, hold=mistake.hold), export, tmp_path, data)


@pytest.mark.parametrize("export", ["marian-4.46.3", "t5"])
def test_a_mask_that_does_not_fit_the_encoder_is_named(export: str, tmp_path: Path) -> None:
    named(MASK_OF_ENCODER, seq2seq(EXPORTS / export, MASK_OF_ENCODER.change), export, tmp_path, SHAPES)


def columns(number: int) -> "Callable[[Feeds, Loop], np.ndarray[Any, Any]]":
    return lambda f, _: np.ones((1, f["attention_mask"].shape[1] + number), np.int64)


KEY, KEY_1, VALUE_0 = "past_key_values.0.key", "past_key_values.1.key", "past_key_values.0.value"
IN_DECODER = {
    "mask of the new tokens": wrong(1, "attention_mask",
        lambda f, _: np.ones_like(f["input_ids"]), "mask-length", "the new tokens alone"),
    "mask of the step before": wrong(1, "attention_mask", columns(-1), "mask-length", "of the step before"),
    "mask too long": wrong(1, "attention_mask", columns(2), "mask-length", "past 3 and new 1 make 4"),
    "mask that hides": mistaken(2, "attention_mask",
        lambda f, _: f["attention_mask"].__setitem__((0, -1), 0), "mask-values", "hides the new token", SMALL),
    "mask that forgets": mistaken(2, "attention_mask",
        lambda f, _: f["attention_mask"].__setitem__((0, 1), 0), "mask-values", "other tokens of the past", SMALL),
    "positions start again": wrong(1, "position_ids",
        lambda f, _: f["position_ids"] * 0, "positions", "starts again at 0", SMALL),
    "positions stand still": wrong(2, "position_ids",
        lambda f, _: f["position_ids"] - 1, "positions", "does not go on", SMALL),
    "positions run ahead": wrong(1, "position_ids",
        lambda f, _: f["position_ids"] + 1, "positions", "starts at 4, where the cache makes it 3", SMALL),
    "positions of all tokens": wrong(1, "position_ids",
        lambda *_: np.arange(4)[None], "positions", "4 positions for 1"),
    "no positions": mistaken(0, "position_ids", lambda f, _: f.pop("position_ids"), "input-missing"),
    "a hole in the mask": wrong(0, "attention_mask",
        lambda f, _: f["attention_mask"] * (np.arange(f["attention_mask"].shape[1]) != 1),
        "mask-values", "which stands between tokens that it shows", SMALL),
    "all ids and the cache": mistaken(1, "input_ids",
        lambda f, loop: (every_id(f, loop), f.update(position_ids=np.arange(f["input_ids"].shape[1])[None])),
        "all-ids-with-cache"),
    "a dummy past": mistaken(0, KEY,
        lambda f, loop: loop.calls or f.update({n: np.zeros((*v.shape[:2], 1, v.shape[3]), np.float32)
                                                for n, v in f.items() if "past" in n}),
        "past-not-empty", "nothing has filled"),
    "past never renewed": mistaken(2, KEY,
        lambda f, loop: f.update({n: v for n, v in loop.fed(-1).items() if "past" in n}), "past-stale"),
    "past forgotten": mistaken(1, KEY,
        each("past", lambda n, f, _: f[n][:, :, :0]), "cache-dropped", "3 tokens are in it"),
    "layers crossed": mistaken(1, KEY, swap(KEY, KEY_1), "slots-crossed", f"belongs to {KEY_1}", EVERYTHING),
    "key and value crossed": mistaken(1, KEY, swap(KEY, VALUE_0), "slots-crossed", f"belongs to {VALUE_0}", EVERYTHING),
    "a layer left out": mistaken(1, KEY_1, lambda f, _: f.pop(KEY_1), "input-missing"),
    "heads behind the length": mistaken(1, KEY,
        each("past", lambda n, f, _: f[n].transpose(0, 2, 1, 3)), "wrong-size", "another order"),
    "two sentences in one cache": mistaken(1, "input_ids",
        lambda f, _: f.update({n: np.repeat(v, 2, 0) for n, v in f.items() if "past" not in n}), "batch-changes"),
    "misspelled": mistaken(0, KEY, lambda f, _: f.update({"past_key_values.0.keys": f.pop(KEY)}), "input-missing"),
}  # fmt: skip


@pytest.mark.parametrize("data", [SHAPES, SMALL, EVERYTHING], ids=["shapes", "small", "everything"])
@pytest.mark.parametrize("name", IN_DECODER)
@pytest.mark.parametrize("export", ALONE)
def test_a_mistake_in_a_decoder_loop_is_named(export: str, name: str, data: int, tmp_path: Path) -> None:
    mistake = IN_DECODER[name]
    named(mistake, decoder_only(EXPORTS / export, mistake.change), export, tmp_path, data)


def named(mistake: Mistake, loop: Loop, export: str, tmp_path: Path, data: int) -> None:
    """The mistake is named where the trace tells enough; where it does not, nothing is made up, and that is said."""
    _, result = held(loop, export, tmp_path, data)
    if data < mistake.data and not result.breaks:
        assert any(mistake.names.partition(".")[0] in name for name in result.blind)
        return
    assert result.step is not None, "no step breaks the contract"
    (found,) = result.breaks
    assert (found.kind, result.step.number) == (mistake.kind, mistake.step), found
    assert mistake.names in found.inputs
    assert mistake.says in found.cause, found.cause


@pytest.mark.parametrize("export", ALONE)
def test_the_last_step_taken_back_is_told_from_a_stale_cache_by_nothing(export: str, tmp_path: Path) -> None:
    """With a mask that goes with it, the finding is suspected; with a mask that does not, it is certain."""
    for columns, certain in ((4, False), (5, True)):

        def change(number: int, feeds: Feeds, loop: Loop, columns: int = columns) -> None:
            if number == 2:
                feeds.update({n: v for n, v in loop.fed(1).items() if "past" in n or n == "position_ids"})
                feeds["attention_mask"] = np.ones((1, columns), np.int64)

        (found,) = held(decoder_only(EXPORTS / export, change, steps=3), export, tmp_path, EVERYTHING)[1].breaks
        assert found.kind == "past-stale"
        assert (found.suspected is None) == certain


@pytest.mark.parametrize("export", ALONE)
def test_rows_of_small_values_are_no_other_sequences(export: str, tmp_path: Path) -> None:
    """Values that were printed keep a few digits: a row that is small beside another loses all of them."""

    def change(number: int, feeds: Feeds, loop: Loop) -> None:
        if number == 2:
            for name in [name for name in feeds if "past" in name]:
                shown = loop.calls[-1]["got"][name.replace("past_key_values", "present")]
                shown[1] *= 1e-7
                feeds[name] = shown + np.array([0, 1e-8], np.float32).reshape(2, 1, 1, 1)

    loop = decoder_only(EXPORTS / export, change, batch=2, steps=3)
    assert held(loop, export, tmp_path, EVERYTHING)[1].breaks == ()


@pytest.mark.parametrize(("following", "breaks"), [(6, ()), (9, ("positions",))])
def test_the_tokens_of_an_image_share_positions(following: int, breaks: tuple[str, ...], tmp_path: Path) -> None:
    """Two tokens of text, an image of 2 x 3, one of text: the next position is the largest one plus 1."""
    rows = [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    model = load_all()["layout-three-position-rows-healthy"].write(tmp_path / "model")
    (contract,) = contracts(str(model)).values()
    lines = []
    for past, positions in ((0, rows), (9, [[following]] * 3)):
        fed = {
            "inputs_embeds": entry([1, len(positions[0]), 8]),
            "attention_mask": entry([1, past + len(positions[0])]),
        }
        fed |= {slot.past: entry([1, 2, past, 4]) for slot in contract.slots}
        fed["position_ids"] = {
            **entry([3, 1, len(positions[0])], "int64"),
            "data": [one for row in positions for one in row],
        }
        got = {str(slot.present): entry([1, 2, past + len(positions[0]), 4]) for slot in contract.slots}
        fed["attention_mask"]["dtype"] = "int64"
        lines.append(json.dumps({"fed": fed, "got": got}))
    (tmp_path / "loop.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = compare_trace(read_recording(str(tmp_path / "loop.jsonl")).first, contract)
    assert tuple(one.kind for one in found.breaks) == breaks


def entry(shape: list[int], dtype: str = "float") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape}


@pytest.mark.parametrize(("calls", "breaks"), [((6, 8, 8), ()), ((20,), ("capacity-exceeded",))])
def test_a_ring_takes_more_tokens_than_it_has_rows_in_several_calls(
    calls: tuple[int, ...], breaks: tuple[str, ...], tmp_path: Path
) -> None:
    model = load_all()["layout-scatter-static-healthy"].write(tmp_path / "model")
    (static,) = contracts(str(model)).values()
    assert static.ring is None
    contract, lines, past = replace(static, ring=16), [], 0
    for new in calls:
        sizes: dict[str, int] = {"batch": 1, "new": new, "past": past, "total": past + new, "capacity": 16}
        graph = contract.graph("decode")
        fed = {
            port.name: entry(
                [size if isinstance(size, int) else sizes[axis] for axis, size in axes_of(port)], port.dtype
            )
            for port in graph.inputs
        }
        got = {str(slot.present): fed[slot.past] for slot in contract.slots}
        lines.append(json.dumps({"fed": fed, "got": got}))
        past += new
    (tmp_path / "loop.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = compare_trace(read_recording(str(tmp_path / "loop.jsonl")).first, contract)
    assert tuple(one.kind for one in found.breaks) == breaks


def axes_of(port: Port) -> list[tuple[str, int | str | None]]:
    return list(zip(port.axes, port.shape or (), strict=True))
