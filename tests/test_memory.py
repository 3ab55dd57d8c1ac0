"""The memory plan: figures computed by hand, figures of real steps, and rules that hold for every cache."""

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.command_line import run
from support.isolated import EXPORTS
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor.analysis.configs import declared_windows, encoder_length
from kvdoctor.analysis.memory import MemoryPlan, Workload, plan_memory
from kvdoctor.contract import ITEM_BYTES, CacheContract, Graph, Phase, Slot
from kvdoctor.decode.runs import ObservedTensor
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report import text

FIXTURES = load_all()

DECODER_GRAPH = {"decoder": Graph("model.onnx", (), ())}
ONE_GRAPH = {"prefill": Phase("decoder"), "decode": Phase("decoder")}


def planned(folder: Path | str, load: Workload, stack: int = 0) -> MemoryPlan:
    found = inspect(str(folder), Options(**asdict(load))).stacks[stack].cache
    assert found is not None
    return found


def of_fixture(name: str, folder: Path, load: Workload) -> MemoryPlan:
    return planned(FIXTURES[name].write(folder), load)


def contract_of(*slots: Slot, **more: Any) -> CacheContract:
    return CacheContract("tested", DECODER_GRAPH, ONE_GRAPH, slots, "empty-past", **more)


def self_slot(**more: Any) -> Slot:
    """A growing key: 2 kv_heads, head_dim 4, floats: 32 B per token."""
    given: dict[str, Any] = {
        "kind": "self-attention",
        "layer": 0,
        "part": "key",
        "dtype": "float",
        "shape": ("batch_size", 2, "past_sequence_length", 4),
        "axes": ("batch", "kv_heads", "past", "head_dim"),
        "past": "past_key_values.0.key",
        "present": "present.0.key",
        "filled_by": "present.0.key",
        "carry": "feed-back",
    }
    return Slot(**{**given, **more})


def ring(window: int | None, capacity: int | str = "past_sliding_length", **more: Any) -> Slot:
    shape, axes = ("batch_size", 2, capacity, 4), ("batch", "kv_heads", "capacity", "head_dim")
    return self_slot(shape=shape, axes=axes, growth="ring", window=window, **more)


SEVEN = Workload(batch=3, context=10, encoder_length=7)


@pytest.mark.parametrize(
    ("name", "each", "sequence", "batch"),
    [
        # 2 layers x (key + value) x 2 heads x 4 wide x 4 B = 128; a past of 9 and a present of 10 tokens in a step
        ("decoder-only-healthy", (128, 0), (1280, 1280), (3840, 3 * 128 * 19)),
        ("decoder-only-half-cache-healthy", (64, 0), (640, 640), (1920, 3 * 64 * 19)),
        # 1 layer: 64 B per token and per state; the cached branch gives the cross cache back, a second copy
        ("merged-healthy", (64, 64), (640, 640 + 448), (3 * 1088, 3 * (64 * 19 + 2 * 448))),
        # the cached branch empties it: the loop holds one
        ("cross-cache-emptied", (64, 64), (640, 640 + 448), (3 * 1088, 3 * (64 * 19 + 448))),
        # the graph with past does not return it at all
        ("pair-healthy", (64, 64), (640, 640 + 448), (3 * 1088, 3 * (64 * 19 + 448))),
        # 2 layers x 2 x 3 heads x 4 wide x 4 B = 192; a ring of 23 tokens whatever the context, twice in a step
        ("layout-aihub-whisper-healthy", (192, 192), (192 * 23, 192 * 30), (3 * 192 * 30, 3 * 192 * 30 + 192 * 23)),
        # a buffer of 23 tokens, of which one new row comes back
        ("layout-aihub-opus-healthy", (192, 192), (192 * 23, 192 * 30), (3 * 192 * 30, 3 * 192 * 30 + 192)),
        # a buffer of 64 tokens, and a counter of 8 B in each of 2 layers for the whole batch
        ("layout-scatter-static-pair-healthy", (128, 0), (128 * 64, 128 * 64), (3 * 8192 + 16, 2 * (3 * 8192 + 16))),
        # 1 attention layer of 96 B per token, a conv state of 8 x 3 and a recurrent one of 2 x 4 x 5 floats
        ("layout-hybrid-recurrent-healthy", (96, 0), (960, 960 + 96 + 160), (3 * 1216, 3 * (96 * 19 + 2 * 256))),
        # states alone: 2 layers x (12 x 3 + 12 x 5) floats
        ("layout-mamba-states-healthy", (0, 0), (0, 768), (3 * 768, 6 * 768)),
        # 4 states of 12 and 2 of 3 x 4 x 4 floats
        ("layout-rwkv-healthy", (0, 0), (0, 576), (3 * 576, 6 * 576)),
        # 3 layers of hidden memory, 8 wide
        ("layout-canary-healthy", (96, 0), (960, 960), (2880, 2880 + 96 * 9)),
        # written in place through a block table, float16
        ("layout-paged-healthy", (64, 0), (640, 640), (1920, 1920)),
        # batch x heads in one axis, 2 heads by the config
        ("layout-bloom-transposed-healthy", (128, 0), (1280, 1280), (3840, 3 * 128 * 19)),
        # key and value side by side, 12 wide
        ("layout-fused-key-value-healthy", (96, 0), (960, 960), (2880, 3 * 96 * 19)),
        # all layers in one tensor; the loop puts the new rows behind the past
        ("layout-llama2-msft-stacked-healthy", (128, 0), (1280, 1280), (3840, 3 * 128 * 20)),
        # the encoder makes 7 states, whatever is asked for
        ("layout-ort-whisper-healthy", (128, 128), (1280, 128 * 17), (3 * 128 * 17, 3 * 128 * (19 + 7))),
    ],
)
def test_layouts_by_hand(
    name: str, each: tuple[int, int], sequence: tuple[int, int], batch: tuple[int, int], tmp_path: Path
) -> None:
    """Bytes per token and encoder state; at the context and in all for a sequence; of the batch, kept and in a step."""
    found = of_fixture(name, tmp_path, SEVEN)
    assert (found.bytes_per_token, found.bytes_per_encoder_state) == each
    assert (found.bytes_at_context, found.bytes_per_sequence) == sequence
    assert (found.bytes_total, found.bytes_in_step) == batch
    assert (found.context, found.batch, found.unknown) == (10, 3, ())


def test_a_window_in_a_growing_cache_is_counted_whole() -> None:
    sliding, full = self_slot(window=8), self_slot(layer=1, past="past_key_values.1.key")
    found = plan_memory(contract_of(sliding, full), Workload(batch=2, context=100))
    assert (found.bytes_per_sequence, found.bytes_in_step) == (32 * 200, 2 * 32 * 2 * 199)
    assert [note for note in found.notes if "window of 8 tokens, by the graph" in note]
    assert [(part.window, part.positions) for part in found.parts] == [(8, 100), (None, 100)]


@pytest.mark.parametrize(("capacity", "positions"), [("past_sliding_length", 4), (6, 6)])
def test_a_ring_keeps_its_buffer_whatever_the_context(capacity: int | str, positions: int) -> None:
    for context in (None, 3, 1000):
        found = plan_memory(contract_of(ring(4, capacity)), Workload(context=context))
        assert found.bytes_per_sequence == 32 * positions


def test_latent_widths_differ_between_key_and_value() -> None:
    key = self_slot(shape=("b", 4, "p", 12))
    value = self_slot(shape=("b", 4, "p", 10), part="value", past="past_key_values.0.value")
    found = plan_memory(contract_of(key, value), Workload(context=3))
    assert found.bytes_per_token == 4 * (12 + 10) * 4
    assert [part.bytes_per_position for part in found.parts] == [192, 160]


def test_without_a_context_only_tokens_are_counted(tmp_path: Path) -> None:
    found = of_fixture("merged-healthy", tmp_path, Workload())
    assert (found.bytes_per_token, found.bytes_per_encoder_state) == (64, 64)
    assert (found.context, found.bytes_at_context, found.bytes_per_sequence, found.bytes_total) == (None,) * 4


def test_the_config_gives_context_and_encoder_length() -> None:
    found = planned(EXPORTS / "whisper", Workload())
    config = json.loads((EXPORTS / "whisper" / "config.json").read_text())
    assert (found.context, found.context_from) == (config["max_target_positions"], "config")
    assert (found.encoder_length, found.encoder_length_from) == (config["max_source_positions"], "config")
    assert found.bytes_per_sequence == 512 * (found.context or 0) + 512 * (found.encoder_length or 0)
    asked = planned(EXPORTS / "whisper", Workload(context=5, encoder_length=6))
    assert (asked.context_from, asked.encoder_length_from) == ("option", "option")
    assert asked.bytes_per_sequence == 512 * 11


def test_the_graph_outweighs_an_option_for_the_encoder(tmp_path: Path) -> None:
    found = of_fixture("layout-ort-whisper-healthy", tmp_path, Workload(encoder_length=1500))
    assert (found.encoder_length, found.encoder_length_from) == (7, "graph")
    assert "the graph fixes the encoder length at 7" in found.notes


def test_a_fixed_batch_is_said(tmp_path: Path) -> None:
    found = of_fixture("layout-aihub-whisper-healthy", tmp_path, Workload(batch=4))
    assert "the graph takes a batch of exactly 1: 4 sequences need 4 calls" in found.notes
    two = contract_of(self_slot(shape=(2, 2, "p", 4)))
    assert plan_memory(two, Workload(context=1)).batch == 2
    assert [
        note
        for note in plan_memory(two, Workload(batch=3, context=1)).notes
        if "2 calls, and 1 rows of the last are unused" in note
    ]


def test_a_buffer_shorter_than_the_context_is_said(tmp_path: Path) -> None:
    found = of_fixture("layout-scatter-static-pair-healthy", tmp_path, Workload(context=65))
    assert [note for note in found.notes if "a fixed length of 64" in note and "no more tokens fit" in note]
    assert not of_fixture("layout-scatter-static-pair-healthy", tmp_path, Workload(context=64)).notes


def test_new_tokens_need_no_place_in_a_buffer_that_gets_them_afterwards(tmp_path: Path) -> None:
    folder = FIXTURES["layout-qnn-window-healthy"].write(tmp_path)
    for stack in (0, 1):
        # a mask of 32: 24 kept and 8 new, and 31 kept and 1 new
        assert not [note for note in planned(folder, Workload(), stack).notes if "a fixed length of" in note]
        assert [note for note in planned(folder, Workload(context=33), stack).notes if "a fixed length of" in note]


def test_an_unknown_width_is_named_and_no_number_invented() -> None:
    state = replace(
        self_slot(), kind="recurrent-state", growth="replace", shape=("b", "n", 4), axes=("batch", "state", "state")
    )
    found = plan_memory(contract_of(state), Workload(context=10))
    assert [lack.reason for lack in found.unknown] == ["its state, which the graph declares as n"]
    assert (found.bytes_per_sequence, found.bytes_total, found.bytes_in_step) == (None, None, None)
    heads = replace(self_slot(), shape=("b*h", "p", 4), axes=("batch_heads", "past", "head_dim"))
    assert plan_memory(contract_of(heads)).unknown[0].reason == "the number of heads in its axis of batch times heads"
    assert plan_memory(contract_of(heads, heads=2)).bytes_per_token == 32
    odd = plan_memory(contract_of(self_slot(dtype="float8e4m3fn")), Workload(context=3))
    assert odd.unknown[0].reason == "the bytes of its element type float8e4m3fn"
    assert odd.bytes_total is None


@pytest.mark.parametrize("size", [0, -1, -(2**63), None, "n"])
def test_what_is_no_size_is_not_multiplied(size: Any) -> None:
    found = plan_memory(contract_of(self_slot(shape=("b", 2, "p", size))), Workload(context=3))
    assert found.bytes_total is None
    assert len(found.unknown) == 1


@pytest.mark.parametrize("wrong", [0, -1, -(2**63)])
def test_numbers_of_a_contract_that_count_nothing_are_left_out(wrong: int) -> None:
    found = plan_memory(contract_of(self_slot(window=wrong), heads=wrong, context_limit=wrong))
    assert (found.context, found.bytes_per_token, found.parts[0].window) == (None, 32, None)


def test_huge_sizes_stay_exact() -> None:
    found = plan_memory(contract_of(self_slot(shape=("b", 2**62, "p", 2**62))), Workload(2**20, 2**31 - 1))
    assert found.bytes_total == 2**20 * (2**31 - 1) * 2**124 * 4


GEMMA = {"sliding_window": 8, "model_type": "gemma3_text"}
QWEN = {"sliding_window": 8, "model_type": "qwen2", "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, {}),
        ({"sliding_window": 8}, {}),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", None, 3]}, {0: 8}),
        ({"sliding_window": None, "layer_types": ["sliding_attention"]}, {}),
        ({"sliding_window": True, "layer_types": ["sliding_attention"]}, {}),
        ({"sliding_window": 8, "use_sliding_window": False, "layer_types": ["sliding_attention"]}, {}),
        ({"sliding_window": 8, "model_type": "mistral", "num_hidden_layers": 2}, {0: 8, 1: 8}),
        ({"sliding_window": 8, "model_type": "mistral", "num_hidden_layers": 2**31}, {}),
        ({"sliding_window": 8, "model_type": ["mistral"], "num_hidden_layers": 2}, {}),
        ({"sliding_window": 8, "model_type": "gemma2", "num_hidden_layers": 4}, {0: 8, 2: 8}),
        ({"sliding_window": 8, "model_type": "gemma2", "num_hidden_layers": 2, "sliding_window_pattern": 1}, {0: 8}),
        ({**GEMMA, "num_hidden_layers": 7}, {0: 8, 1: 8, 2: 8, 3: 8, 4: 8, 6: 8}),
        ({**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 2}, {0: 8, 2: 8}),
        ({**GEMMA, "num_hidden_layers": 2, "sliding_window_pattern": 0}, {0: 8, 1: 8}),
        ({**GEMMA, "num_hidden_layers": 2, "layer_types": []}, {}),
        ({"sliding_window": 8, "model_type": "cohere2", "num_hidden_layers": 4}, {0: 8, 1: 8, 2: 8}),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 2}, {2: 8}),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": -1}, {0: 8, 1: 8, 2: 8}),
        ({**QWEN, "use_sliding_window": True}, {}),
        ({**QWEN, "max_window_layers": 0}, {}),
        ({"sliding_window": 8, "model_type": "unheard-of", "num_hidden_layers": 2}, {}),
        ({"text_config": {"sliding_window": 8, "layer_types": ["sliding_attention"]}}, {0: 8}),
        ({"sliding_window": 8, "layer_types": "sliding_attention"}, {}),
    ],
)
def test_windows_that_a_config_declares(config: dict[str, Any], windows: dict[int, int]) -> None:
    assert declared_windows(config) == windows


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_source_positions": 1500, "max_position_embeddings": 448}, 1500),
        ({"max_encoder_position_embeddings": 16384}, 16384),
        ({"max_position_embeddings": 512}, None),
        ({"encoder": {"max_position_embeddings": 512}}, 512),
        ({"encoder": ["max_position_embeddings"]}, None),
        *(({"max_source_positions": wrong}, None) for wrong in (0, -1, True, "1500", 1.5, 10**30, None, [1500], {})),
    ],
)
def test_encoder_lengths_that_a_config_declares(config: dict[str, Any], length: int | None) -> None:
    assert encoder_length(config) == length


def test_the_window_of_a_config_reaches_the_plan(tmp_path: Path) -> None:
    folder = FIXTURES["decoder-only-healthy"].write(tmp_path)
    config = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = planned(folder, Workload(context=100))
    assert [note for note in found.notes if "2 of 4" in note and "by the config" in note]


def size_of(seen: ObservedTensor) -> int:
    return math.prod(seen.shape) * ITEM_BYTES[seen.dtype]


@pytest.mark.parametrize("name", sampled(["gpt2", "llama-gqa", "marian-4.46.3", "t5", "whisper"], 3))
def test_real_steps_keep_what_the_plan_says(name: str) -> None:
    """The tensors of every decode step of the held loop, counted one by one."""
    report = step_test(str(EXPORTS / name))
    compared = 0
    for stack in report.stacks:
        contract = stack.contract
        assert contract is not None
        loops = {r.experiment: r for r in report.runs if r.stack == stack.name and r.outcome == "passed"}
        run = loops.get("held-loop") or loops["plain-loop"]
        for step in [step for step in run.steps if step.phase == "decode" and step.new_tokens == 1]:
            fed = {slot.past: step.fed[slot.past] for slot in contract.slots}
            states = next((fed[s.past].shape[2] for s in contract.of_kind("cross-attention")), None)
            load = Workload(next(iter(fed.values())).shape[0], step.past_length + 1, states)
            wanted = plan_memory(contract, load)
            returned = {slot.past: step.returned[slot.present] for slot in contract.slots if slot.present}
            held = {slot.past: fed[slot.past] for slot in contract.held}
            assert sum(map(size_of, {**returned, **held}.values())) == wanted.bytes_total
            assert sum(map(size_of, [*fed.values(), *returned.values()])) == wanted.bytes_in_step
            compared += 1
    assert compared >= 2


SIZES = st.integers(1, 9)


@st.composite
def slots(draw: st.DrawFn) -> Slot:
    """Any slot of a decoder: kinds, growths, orders of axes, numbers and names."""
    kind = draw(st.sampled_from(["self-attention", "cross-attention", "hidden-memory", "conv-state", "counter"]))
    index = draw(st.integers(0, 10**6))
    common: dict[str, Any] = {
        "layer": draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from(["float", "float16", "double", "int8", "uint8"])),
        "past": f"past.{index}",
        "filled_by": f"present.{index}",
        "present": draw(st.sampled_from([f"present.{index}", None])),
        "carry": "feed-back",
    }
    if kind in ("conv-state", "counter"):
        shape, axes = (("b", draw(SIZES), draw(SIZES)), ("batch", "channels", "state"))
        return Slot(kind=kind, part="state", shape=shape, axes=axes, growth="replace", **common)
    growths = {"cross-attention": ["constant"], "hidden-memory": ["grow"]}
    growth = draw(st.sampled_from(growths.get(kind, ["grow", "shared", "static", "ring", "delta", "paged"])))
    window = draw(st.one_of(st.none(), SIZES)) if kind == "self-attention" else None
    part = draw(st.sampled_from(["key", "value", "key-value"]))
    if growth == "paged":
        shape, axes = ("blocks", draw(st.sampled_from(["block", 16, 7])), draw(SIZES), draw(SIZES)), None
        axes = ("blocks", "block", "kv_heads", "head_dim")
        return Slot(kind=kind, part=part, shape=shape, axes=axes, growth=growth, window=window, **common)
    buffered = growth in ("static", "ring", "delta")
    length = "encoder" if kind == "cross-attention" else "capacity" if buffered else "past"
    size = draw(st.one_of(st.just("n"), SIZES)) if length != "past" else "n"
    named = [("b", "batch"), (draw(SIZES), "kv_heads"), (size, length), (draw(SIZES), "head_dim")]
    order = draw(st.permutations(named))
    shape, axes = tuple(s for s, _ in order), tuple(a for _, a in order)
    return Slot(kind=kind, part=part, shape=shape, axes=axes, growth=growth, window=window, **common)  # type: ignore[arg-type]


CONTRACTS = st.lists(slots(), min_size=1, max_size=5).map(lambda found: contract_of(*found, heads=8))
LOADS = st.builds(Workload, st.integers(1, 5), st.integers(1, 300), st.integers(1, 20))


@given(CONTRACTS, LOADS)
def test_a_cache_is_as_large_as_its_tensors(contract: CacheContract, load: Workload) -> None:
    """The same figure by another way: every tensor with all of its sizes filled in."""
    context, total = load.context or 0, 0
    for slot in contract.slots:
        ringed = slot.window if slot.growth == "ring" and slot.window else context
        open_sizes = {"batch": 1, "past": context, "capacity": ringed, "encoder": load.encoder_length or 0}
        block = slot.size("block") or 1
        open_sizes |= {"block": block, "blocks": math.ceil(context / block)}
        shape = [
            size if isinstance(size, int) else open_sizes[axis]
            for size, axis in zip(slot.shape, slot.axes, strict=True)
        ]
        total += math.prod(shape) * ITEM_BYTES[slot.dtype]
    assert plan_memory(contract, load).bytes_per_sequence == total


LLAMA = EXPORTS / "llama-gqa"


@pytest.mark.slow
def test_the_command_shows_the_plan_where_it_is_asked_for() -> None:
    assert "memory plan" not in run("inspect", LLAMA).stdout
    assert "memory plan" in run("inspect", LLAMA, "-v").stdout
    for option in (["--batch", "1"], ["--context", "64"], ["--encoder-length", "9"]):
        assert "memory plan" in run("inspect", LLAMA, *option).stdout
        assert "emory plan" in run("inspect", LLAMA, *option, "--format", "markdown").stdout
    assert "memory plan" not in run("inspect", LLAMA, "--batch", "4", "-q").stdout


def test_the_command_computes_for_the_load() -> None:
    shown = run("inspect", LLAMA, "--batch", "8", "--context", "32").stdout
    assert "memory plan for 8 sequences of 32 tokens" in shown
    assert "4 tensors x 2 kv_heads x 8 head_dim x 4 B = 256 B per token; x 32 tokens = 8.0 KiB" in shown
    assert "x 8 = 64.0 KiB" in shown
    document = json.loads(run("inspect", LLAMA, "--batch", "8", "--context", "32", "--format", "json").stdout)
    cache = document["stacks"][0]["cache"]
    assert (cache["bytes_per_token"], cache["bytes_at_context"], cache["bytes_total"]) == (256, 8192, 65536)
    assert {"batch": 8, "context": 32}.items() <= document["arguments"].items()


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--batch", value] for value in ("0", "-1", "1.5", "x", "", str(2**20 + 1), "9" * 400)),
        *(["--context", value] for value in ("0", "-5", "nan", str(2**31))),
        *(["--encoder-length", value] for value in ("0", "1e3", str(2**31))),
    ],
    ids=lambda value: "=".join(value)[:40],
)
def test_wrong_numbers_are_wrong_usage(wrong: list[str]) -> None:
    done = run("inspect", LLAMA, *wrong)
    assert (done.returncode, done.stdout) == (2, "")
    assert wrong[0] in done.stderr


@pytest.mark.parametrize("config", ["{", "[]", '{"max_source_positions": "\u001b[31m", "layer_types": {}}', "1e999"])
def test_a_hostile_config_changes_nothing(config: str, tmp_path: Path) -> None:
    folder = FIXTURES["merged-healthy"].write(tmp_path)
    (folder / "config.json").write_text(config)
    found = planned(folder, SEVEN)
    assert found.bytes_total == 3 * 1088


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_a_terminal(columns: int) -> None:
    page = io.StringIO()
    terminal = Console(file=page, width=columns, force_terminal=True, color_system=None, highlight=False)
    text.print_report(inspect(str(EXPORTS / "whisper"), Options(batch=64)), terminal)
    lines = [line for line in page.getvalue().split("\n") if "kvdoctor re-export" not in line]  # to copy: never broken
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("  in a step ") for line in lines)
