"""Sizes as terms: what numbers of a graph stand for, and graphs that are changed by it, run at other sizes."""

import math
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.analysis.proof.types import Term, product, symbol
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.contract import Graph, Port
from kvdoctor.repair.repairs.axes import synthesize_feeds
from kvdoctor.repair.shapes.freeing import AxisFreeing, free_axes, read_declared_sizes
from kvdoctor.repair.shapes.reshapes import align_target, fill_target, write_target
from kvdoctor.repair.shapes.terms import CannotFree, read_lengths
from kvdoctor.repair.workspace import CannotRepair

ROOT = Path(__file__).parent.parent
B, P, S = symbol("batch"), symbol("past"), symbol("new")
EMPTY = frozenset({"past"})


def reshaped(shape: list[int], target: list[int], allowzero: bool) -> list[int]:
    """What the runtime makes of a Reshape."""
    text = f"""<ir_version: 9, opset_import: ["" : 17]>
    g (float[{", ".join("abcdefgh"[: len(shape)])}] x, int64[n] t) => (float y) {{
        y = Reshape <allowzero = {int(allowzero)}> (x, t)
    }}"""
    feeds = {"x": np.zeros(shape, np.float32), "t": np.array(target)}
    return list(session(parser.parse_model(text)).run(None, feeds)[0].shape)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


TERMS = st.recursive(
    st.sampled_from([B, P, S, whole(0), whole(1), whole(-3), whole(8)]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: two[0] + two[1]),
        st.tuples(inner, inner).map(lambda two: two[0] * two[1]),
        st.tuples(inner, inner).map(lambda two: two[0] - two[1]),
    ),
    max_leaves=5,
)
SIZES = st.fixed_dictionaries({name: st.integers(0, 9) for name in ("batch", "past", "new")})


@given(TERMS, TERMS, SIZES)
def test_terms_are_counted_as_numbers_are(left: Term, right: Term, sizes: Mapping[str, int]) -> None:
    assert (left + right).at(sizes) == left.at(sizes) + right.at(sizes)
    assert (left - right).at(sizes) == left.at(sizes) - right.at(sizes)
    assert (left * right).at(sizes) == left.at(sizes) * right.at(sizes)
    if right.parts:
        assert (left * right).divided(right) == left


def test_what_does_not_divide_says_so() -> None:
    assert (B * S + whole(1)).divided(B) is None
    assert whole(7).divided(whole(2)) is None
    assert B.divided(whole(0)) is None
    assert str(P + whole(2) * S - whole(1)) == "past + 2*new - 1"


AXES = st.lists(st.sampled_from([B, P + S, S, P, whole(4), whole(8), whole(1)]), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(AXES, st.data())
def test_a_written_target_gives_its_axes_at_every_length_also_where_the_past_is_empty(
    into: list[Term], data: st.DataObject
) -> None:
    """Neighbors are joined at random, so that targets copy, compute and leave one entry to be worked out."""
    cuts = data.draw(st.lists(st.booleans(), min_size=len(into) - 1, max_size=len(into) - 1))
    out, run = list[Term](), [into[0]]
    for axis, cut in zip(into[1:], cuts, strict=True):
        if cut:
            out, run = [*out, product(run)], [axis]
        else:
            run.append(axis)
    out.append(product(run))
    target = write_target(tuple(into), tuple(out), False, EMPTY)
    for sizes in ({"batch": 2, "past": 5, "new": 3}, {"batch": 3, "past": 0, "new": 1}):
        numbers = [entry.at(sizes) if isinstance(entry, Term) else entry for entry in target.entries]
        wanted = [term.at(sizes) for term in out]
        assert reshaped([term.at(sizes) for term in into], numbers, target.allowzero) == wanted


@pytest.mark.parametrize(
    ("into", "said", "frozen", "meant"),
    [
        ((B, S, whole(32)), (2, 7, -1, 8), {"batch": 2, "new": 7}, (B, S, whole(4), whole(8))),
        ((B, S, whole(32)), (-1, 1, 4, 8), {"batch": 99, "new": 1}, (B, S, whole(4), whole(8))),
        ((B, S, whole(32)), (-1, 32), {"batch": 99, "new": 1}, (B * S, whole(32))),
        (
            (B, whole(2), whole(2), P + S, whole(8)),
            (8, 8, 8),
            {"batch": 2, "past": 7, "new": 1},
            (whole(4) * B, P + S, whole(8)),
        ),
        (
            (whole(4) * B, P + S, whole(8)),
            (2, 4, 8, 8),
            {"batch": 2, "past": 7, "new": 1},
            (B, whole(4), P + S, whole(8)),
        ),
        ((B, S, whole(4), whole(8)), (1, 1, 32), {"batch": 1, "new": 1}, (B, S, whole(32))),
        ((B, whole(4), P, whole(8)), (0, 0, 4, 0), {"batch": 99, "past": 4}, (B, whole(4), P, whole(8))),
    ],
)
def test_the_numbers_of_a_reshape_are_told_by_the_axes_that_come_in(
    into: tuple[Term, ...], said: tuple[int, ...], frozen: dict[str, int], meant: tuple[Term, ...]
) -> None:
    sizes = {"past": 0, **frozen}
    entries, guess = fill_target(into, tuple(map(whole, said)), False) or ((), None)
    numbers = list(entries)
    if guess is not None:
        rest = math.prod(term.at(sizes) for at, term in enumerate(entries) if at != guess)
        numbers[guess] = whole(product(into).at(sizes) // rest)
    assert align_target(into, tuple(numbers), guess, lambda term: term.at(sizes)) == meant


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("export", ["gpt2", "llama-gqa", "marian-4.46.3", "t5", "whisper"])
def test_every_axis_of_every_output_is_known_before_anything_runs(export: str, phase: Any) -> None:
    """The real exports, at sizes that are all different: as computed, so they come out."""
    folder = open_folder(str(ROOT / "fixtures" / "exports" / export))
    stack = folder.stacks[-1]  # without branches: what comes out is one thing
    graph = read_contract(stack, folder.side_cars).graph(phase)
    path = next(file.path for file in folder.files if file.name == graph.file)
    model = onnx.load(path)
    lengths = read_lengths(graph, read_declared_sizes(model))
    reading = AxisFreeing(model, lengths)
    assert not reading.conflicts
    assert not reading.facts.bound
    assert all(known.shape is not None and None not in known.shape for known in reading.main.values.values())
    sizes = {"batch": 2, "past": 5, "new": 3, "encoder": 7}
    run = session(model)
    names = [port.name for port in run.get_outputs()]
    for name, value in zip(names, run.run(None, synthesize_feeds(graph, True)), strict=True):
        shape = reading.main.values[name].shape
        assert shape is not None
        assert [reading.facts.real(term).at(sizes) for term in shape if term is not None] == list(value.shape), name


@pytest.mark.parametrize("size", [1 << 28, 1 << 62])
def test_feeds_above_the_memory_limit_are_not_made(size: int) -> None:
    """What an input declares is not allocated: of 2**62 numbers there is no array."""
    graph = Graph("model.onnx", (Port("large", "float", (size, 3), "unused", ("fixed", "fixed")),), ())
    with pytest.raises(CannotRepair, match="memory limit"):
        synthesize_feeds(graph, True, most=400 << 20)


@pytest.mark.parametrize("step", [lambda term, _: term * term, lambda term, name: term * (symbol(name) + whole(1))])
def test_sizes_that_grow_without_end_are_refused(step: Any) -> None:
    """A chain of 60 products: squared each time, the last one has 2**60 factors; of 60 lengths, 2**60 parts."""
    term = symbol("past") + whole(1)
    with pytest.raises(OverflowError, match="too many lengths"):
        reduce(step, (f"length{number}" for number in range(60)), term)


def small(
    body: str, inputs: str, outputs: str, constants: Mapping[str, np.ndarray], opset: int = 17
) -> onnx.ModelProto:
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : {opset}]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def ports(**shapes: tuple[tuple[int | str, ...], tuple[str, ...]]) -> Graph:
    kinds = {"ids": ("token_ids", "int64"), "mask": ("attention_mask", "int64")}
    inputs = tuple(
        Port(name, kinds.get(name, ("past", "float"))[1], shape, kinds.get(name, ("past", "float"))[0], axes)  # type: ignore[arg-type]
        for name, (shape, axes) in shapes.items()
    )
    return Graph("model.onnx", inputs, ())


SCORES = ports(ids=((1, 7), ("batch", "new")), past=(("b", 5, 8), ("batch", "past", "head_dim")))


def with_mask(mask: np.ndarray) -> onnx.ModelProto:
    """One score for each new token and each cached one, and a mask that was traced at 7 tokens on a past of 5."""
    body = """
        new = Cast <to = 1> (ids)
        row = Unsqueeze (new, last)
        wide = Expand (row, width)
        all = Concat <axis = 1> (past, wide)
        turned = Transpose <perm = [0, 2, 1]> (all)
        scores = MatMul (wide, turned)
        masked = Add (scores, mask)
    """
    constants = {"last": np.array([2]), "width": np.array([1, 1, 8]), "mask": mask}
    return small(body, "int64[1, 7] ids, float[b, 5, 8] past", "float[b, 7, 12] masked", constants)


CAUSAL = np.where(np.arange(12) <= np.arange(7)[:, None] + 5, 0, -1e9).astype(np.float32)


def test_a_causal_mask_that_was_traced_becomes_one_of_any_length() -> None:
    model = with_mask(CAUSAL)
    original = session(model)
    free_axes(model, SCORES, ("batch", "past", "new"), numpy_helper.to_array)
    changed = session(model)
    at_trace = feeds(1, 5, 7)
    assert np.array_equal(original.run(None, at_trace)[0], changed.run(None, at_trace)[0])
    for batch, past, new in ((2, 3, 5), (1, 0, 3), (3, 11, 1)):
        masked = changed.run(None, feeds(batch, past, new))[0]
        assert masked.shape == (batch, new, past + new)
        hidden = masked < -1e8
        assert (hidden == (np.arange(past + new) > np.arange(new)[:, None] + past)).all()
    assert [dim.dim_param for dim in model.graph.output[0].type.tensor_type.shape.dim] == [
        *("b", "sequence_length", "past_sequence_length + sequence_length")
    ]


def feeds(batch: int, past: int, new: int) -> dict[str, np.ndarray]:
    random_numbers = np.random.default_rng(past)
    return {
        "ids": random_numbers.integers(1, 4, (batch, new)),
        "past": random_numbers.standard_normal((batch, past, 8)).astype(np.float32),
    }


def test_a_mask_of_another_pattern_is_refused_and_named() -> None:
    window = np.where(np.abs(np.arange(12) - np.arange(7)[:, None] - 4) < 2, 0, -1e9).astype(np.float32)
    with pytest.raises(CannotFree, match=r"mask .*Add .*past \+ new = 12"):
        free_axes(with_mask(window), SCORES, ("batch", "past", "new"), numpy_helper.to_array)


def test_one_row_of_values_for_the_one_new_token_is_refused() -> None:
    """A row of a table of positions looks so: whether it is one, nothing tells."""
    body = "words = Gather (table, ids) placed = Add (words, place) all = Concat <axis = 1> (past, placed)"
    rows = np.arange(8, dtype=np.float32)[None]
    constants = {"table": np.eye(8, dtype=np.float32), "place": rows}
    graph = ports(ids=((1, 1), ("batch", "new")), past=((1, 5, 8), ("batch", "past", "head_dim")))
    inputs, outputs = "int64[1, 1] ids, float[1, 5, 8] past", "float[1, 6, 8] all"
    with pytest.raises(CannotFree, match="place"):
        free_axes(small(body, inputs, outputs, constants), graph, ("past",), numpy_helper.to_array)
    even = small(body, inputs, outputs, {**constants, "place": np.ones((1, 8), np.float32)})
    assert free_axes(even, graph, ("past",), numpy_helper.to_array)
    assert free_axes(small(body, inputs, outputs, constants), graph, ("batch",), numpy_helper.to_array)


def test_positions_that_count_up_from_the_past_are_counted() -> None:
    body = """
        words = Gather (table, ids)
        places = Gather (table, numbers)
        placed = Add (words, places)
        all = Concat <axis = 1> (past, placed)
    """
    constants = {"table": np.eye(32, 8, dtype=np.float32), "numbers": np.arange(5, 8)[None]}
    model = small(body, "int64[1, 3] ids, float[1, 5, 8] past", "float[1, 8, 8] all", constants)
    graph = ports(ids=((1, 3), ("batch", "new")), past=((1, 5, 8), ("batch", "past", "head_dim")))
    free_axes(model, graph, ("past", "new"), numpy_helper.to_array)
    given_feeds = {"ids": np.array([[0, 0]]), "past": np.zeros((1, 2, 8), np.float32)}
    placed = session(model).run(None, given_feeds)[0][0, 2:]
    assert [int(row.argmax()) for row in placed - np.eye(1, 8, dtype=np.float32)] == [2, 3]


def test_indexes_that_pick_every_entry_in_its_place_take_any_size() -> None:
    places = np.stack(np.meshgrid(np.arange(2), [0], np.arange(6), indexing="ij"), -1)[..., [0, 2]]
    body = """
        picked = GatherND (mask, places)
        real = Cast <to = 1> (picked)
        row = Squeeze (real, axis)
        sums = Mul (row, past)
    """
    constants = {"places": places, "axis": np.array([1])}
    model = small(body, "int64[2, 6] mask, float[2, 6] past", "float[2, 6] sums", constants)
    graph = ports(mask=((2, 6), ("batch", "past")), past=((2, 6), ("batch", "past")))
    free_axes(model, graph, ("batch", "past"), numpy_helper.to_array)
    mask, past = np.arange(15).reshape(3, 5), np.ones((3, 5), np.float32)
    assert np.array_equal(session(model).run(None, {"mask": mask, "past": past})[0], mask)


def test_lengths_with_two_numbers_are_refused() -> None:
    graph = ports(ids=((1, 1), ("batch", "new")), past=((2, 5, 8), ("batch", "past", "head_dim")))
    model = small("all = Identity (past)", "int64[1, 1] ids, float[2, 5, 8] past", "float[2, 5, 8] all", {})
    with pytest.raises(CannotFree, match="1 and 2"):
        free_axes(model, graph, ("batch",), numpy_helper.to_array)
