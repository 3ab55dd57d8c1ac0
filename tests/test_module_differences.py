"""The first module that differs from a checkpoint: faults in copies of a real export, compared with its healthy values.

Modules are made of the values of the healthy export, so that no PyTorch is needed; `test_reference.py` has that.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto
from onnx.numpy_helper import from_array, to_array
from support.graph_faults import EXPORTS, broken, node

from kvdoctor.decode.runs import PartDifference, Run
from kvdoctor.diagnose.locate.graph_runner import GraphRunner
from kvdoctor.diagnose.locate.modules import (
    Module,
    ModuleCall,
    ModuleComparison,
    ModuleSearch,
    match_scopes,
    measure,
    part_of,
)
from kvdoctor.errors import CannotCheck
from kvdoctor.report.wording.runs import describe_parts, tabulate_parts
from kvdoctor.runtime.client import Runtime

LAYER = {
    "ln_1": ("{up}", "{at}/ln_1/LayerNormalization_output_0"),
    "attn.c_attn": ("{at}/ln_1/LayerNormalization_output_0", "{at}/attn/c_attn/Reshape_1_output_0"),
    "attn.c_proj": ("{at}/attn/Reshape_3_output_0", "{at}/attn/c_proj/Reshape_1_output_0"),
    "attn": ("{at}/ln_1/LayerNormalization_output_0", "{at}/attn/c_proj/Reshape_1_output_0"),
    "ln_2": ("{at}/Add_output_0", "{at}/ln_2/LayerNormalization_output_0"),
    "mlp.c_fc": ("{at}/ln_2/LayerNormalization_output_0", "{at}/mlp/c_fc/Reshape_1_output_0"),
    "mlp.act": ("{at}/mlp/c_fc/Reshape_1_output_0", "{at}/mlp/act/Mul_3_output_0"),
    "mlp.c_proj": ("{at}/mlp/act/Mul_3_output_0", "{at}/mlp/c_proj/Reshape_1_output_0"),
    "mlp": ("{at}/ln_2/LayerNormalization_output_0", "{at}/mlp/c_proj/Reshape_1_output_0"),
    "": ("{up}", "{at}/Add_1_output_0"),
}
"""Modules of a layer in the order in which they end, with the values that go in and come out."""
FEEDS = {
    "input_ids": np.arange(20, 27)[None],
    "attention_mask": np.ones((1, 7), np.int64),
    "position_ids": np.arange(7)[None],
    **{f"past_key_values.{n}.{kind}": np.zeros((1, 4, 0, 8), np.float32) for n in (0, 1) for kind in ("key", "value")},
}


def modules_of(name: Callable[[str], str] = lambda name: name) -> dict[str, tuple[str, str]]:
    """The modules of the fixture by the values before and behind them."""
    found = {"transformer.wte": ("input_ids", "/transformer/wte/Gather_output_0")}
    up = "/transformer/Add_output_0"
    for number in (0, 1):
        at = f"/transformer/h.{number}"
        for short, (given, gave) in LAYER.items():
            found[f"transformer.h.{number}.{short}".rstrip(".")] = (given.format(at=at, up=up), gave.format(at=at))
        up = f"{at}/Add_1_output_0"
    found["transformer.ln_f"] = (up, "/transformer/ln_f/LayerNormalization_output_0")
    found["lm_head"] = ("/transformer/ln_f/LayerNormalization_output_0", "logits")
    return {name(module): values for module, values in found.items()} | {"": ("input_ids", "logits")}


@pytest.fixture(scope="module")
def healthy(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, np.ndarray]:
    runner = make_runner(runtime, tmp_path_factory.mktemp("healthy"))
    wanted = {value for pair in modules_of().values() for value in pair}
    source = EXPORTS / "gpt2" / "model.onnx"
    return runner.arrays(runner.flatten(source, {}), sorted(wanted), runner.feeds(feeds_of(source)))


def feeds_of(source: Path) -> dict[str, np.ndarray]:
    """The feeds, with empty pasts of the heads and width of the fixture."""
    sizes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in onnx.load(source).graph.input}
    return {
        name: np.zeros((1, sizes[name][1], 0, sizes[name][3]), np.float32) if name.startswith("past") else FEEDS[name]
        for name in sizes
    }


def make_runner(runtime: Runtime, folder: Path) -> GraphRunner:
    return GraphRunner(runtime, folder, "CPUExecutionProvider", time.monotonic() + 300)


def compare(
    source: Path, healthy: Mapping[str, np.ndarray], runner: GraphRunner, name: Callable[[str], str] = lambda n: n
) -> ModuleComparison:
    modules = tuple(
        Module((module,), "Made", healthy[given], healthy[gave]) for module, (given, gave) in modules_of(name).items()
    )
    call = ModuleCall(modules, name("transformer.wte"), "lm_head", runner.feeds(feeds_of(source)))
    return ModuleSearch(runner, runner.flatten(source, {}), call, 2e-4).compare()


def other_weight(graph: GraphProto) -> None:
    tensor = next(t for t in graph.initializer if t.name == "transformer.h.1.mlp.c_fc.weight")
    values = to_array(tensor).copy()
    values[0, 0] += 0.5
    tensor.CopyFrom(from_array(values, tensor.name))


def other_activation(graph: GraphProto) -> None:
    node(graph, "/transformer/h.0/mlp/act/Tanh").op_type = "Softsign"


def other_epsilon(graph: GraphProto) -> None:
    norm = node(graph, "/transformer/h.1/ln_2/LayerNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = 1e-2


def no_mask(graph: GraphProto) -> None:
    node(graph, "/transformer/h.1/attn/Softmax").input[0] = "/transformer/h.1/attn/MatMul_output_0"


def scaled_logits(graph: GraphProto) -> None:
    head = node(graph, "/lm_head/MatMul")
    head.output[0] = "/lm_head/MatMul_output_0"
    graph.initializer.append(from_array(np.float32(2.0), "cap"))
    graph.node.add(op_type="Mul", name="/Mul", input=[head.output[0], "cap"], output=["logits"])


FAULTS = {
    "weight": (other_weight, "transformer.h.1.mlp.c_fc", "Gemm", 1),
    "activation": (other_activation, "transformer.h.0.mlp.act", "Softsign", 0),
    "epsilon": (other_epsilon, "transformer.h.1.ln_2", "LayerNormalization", 1),
    "mask": (no_mask, "transformer.h.1.attn", "Softmax", 1),
    "scaled logits": (scaled_logits, "the model itself", "Mul", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_module_that_differs_is_named(
    fault: str, healthy: Mapping[str, np.ndarray], runtime: Runtime, tmp_path: Path
) -> None:
    surgery, module, op, layer = FAULTS[fault]
    folder = broken("gpt2", "model.onnx", surgery, tmp_path / "model")
    found = compare(folder / "model.onnx", healthy, make_runner(runtime, tmp_path))
    assert found.reason is None
    place = found.location
    assert place is not None
    assert place.words.startswith(f"the inputs of {module} ("), place.words
    assert place.node is not None
    assert (place.layer, place.source) == (layer, "graph")
    (nodes,) = place.provenance
    assert f'{op} "' in nodes
    assert nodes.startswith("this node computes it") == (fault in ("weight", "epsilon", "scaled logits"))


def test_the_parts_are_listed_in_order(healthy: Mapping[str, np.ndarray], runtime: Runtime, tmp_path: Path) -> None:
    folder = broken("gpt2", "model.onnx", other_weight, tmp_path / "model")
    parts = compare(folder / "model.onnx", healthy, make_runner(runtime, tmp_path)).parts
    assert [(part.layer, part.part) for part in parts] == [
        (None, "embedding"),
        *((n, part) for n in (0, 1) for part in ("ln_1", "attention", "ln_2", "MLP")),
        (None, "final norm"),
        (None, "head"),
    ]
    assert [part.differs for part in parts] == [False] * 8 + [True] * 3
    assert "embedding to layer 1 ln_2 within 0.0e+00; layer 1 MLP" in describe_parts(parts)
    table = tabulate_parts(Run("", "", "", "", "", "differs", parts=parts))
    assert table is not None
    assert [row[3] for row in table[1]] == [""] * 8 + ["first that differs", "differs", "differs"]


def test_a_healthy_export_has_no_location(healthy: Mapping[str, np.ndarray], runtime: Runtime, tmp_path: Path) -> None:
    found = compare(EXPORTS / "gpt2" / "model.onnx", healthy, make_runner(runtime, tmp_path))
    assert found.location is None
    assert "modules that could be matched agree" in (found.reason or "")
    assert not any(part.differs for part in found.parts)


def test_nothing_is_placed_without_names(healthy: Mapping[str, np.ndarray], runtime: Runtime, tmp_path: Path) -> None:
    def nameless(graph: GraphProto) -> None:
        other_activation(graph)
        for index, one in enumerate(graph.node):
            one.name = f"node_{index}"

    folder = broken("gpt2", "model.onnx", nameless, tmp_path / "model")
    with pytest.raises(CannotCheck, match="no node of the graph is named after a module"):
        compare(folder / "model.onnx", healthy, make_runner(runtime, tmp_path))
    with pytest.raises(CannotCheck, match="no node of the graph is named after a module"):
        compare(
            EXPORTS / "gpt2" / "model.onnx",
            healthy,
            make_runner(runtime, tmp_path),
            lambda name: f"other{abs(hash(name))}",
        )


def test_leading_parts_of_names_may_differ() -> None:
    modules = ["model.layers.0.mlp", "model.layers.1.mlp", "lm_head"]
    assert match_scopes(["layers.0.mlp", "layers.1.mlp"], modules) == {
        "layers.0.mlp": "model.layers.0.mlp",
        "layers.1.mlp": "model.layers.1.mlp",
    }
    assert match_scopes(["decoder.model.layers.1.mlp"], modules) == {"decoder.model.layers.1.mlp": "model.layers.1.mlp"}
    assert match_scopes(["model.layers.1.mlp", "lm_head"], modules)["lm_head"] == "lm_head"
    assert match_scopes(["lm_head", "blocks.7.mlp"], modules) == {}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.self_attn.q_proj", (3, "attention")),
        ("model.decoder.layers.0.encoder_attn.k_proj", (0, "cross-attention")),
        ("model.decoder.layers.0.encoder_attn_layer_norm", (0, "encoder_attn_layer_norm")),
        ("decoder.block.1.layer.1.EncDecAttention.q", (1, "cross-attention")),
        ("decoder.block.1.layer.2.DenseReluDense.wi", (1, "MLP")),
        ("model.layers.2.mlp.gate_proj", (2, "MLP")),
        ("model.decoder.layers.2.fc1", (2, "MLP")),
        ("model.layers.2", None),
        ("model.norm", (None, "final norm")),
        ("model.rotary_emb", None),
        ("", None),
    ],
)
def test_modules_belong_to_parts(name: str, part: tuple[int | None, str] | None) -> None:
    assert part_of((name,), "model.embed_tokens", "lm_head") == part


def test_a_difference_is_measured_by_the_expected_values() -> None:
    expected = np.array([0.0, 2.0])
    assert measure(np.array([0.0, 2.5]), expected) == pytest.approx(0.5)
    assert measure(np.array([np.nan, 2.0]), expected) == -1
    assert measure(np.array([np.inf, 2.0]), np.array([np.inf, 2.0])) == 0
    parts = (PartDifference("head", None, -1.0, True),)
    assert describe_parts(parts) == "head not finite"
