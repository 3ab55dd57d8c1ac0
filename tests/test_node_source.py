"""From a node to the source of the model: what exporters leave at a node, and where a finding says it."""

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper
from support.command_line import kvdoctor
from support.text_fixtures import load_all

from kvdoctor.diagnose.node_source import find_sources, source_of
from kvdoctor.findings import NodeSource
from kvdoctor.model.view import GraphView

SCOPES, CLASSES, TRACE = (f"pkg.torch.onnx.{key}" for key in ("name_scopes", "class_hierarchy", "stack_trace"))
INSTALLED = "/home/someone/.venv/lib/python3.11/site-packages"
WORDS = "model.layers.1.self_attn (LlamaAttention), llama/modeling_llama.py:257 forward"


def node(name: str = "node_add_3", **metadata: str) -> onnx.NodeProto:
    made = helper.make_node("Add", ["a", "b"], ["c"], name)
    for key, value in metadata.items():
        made.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=value)
    return made


def test_metadata_of_the_dynamo_exporter_name_module_class_and_line() -> None:
    found = source_of(
        node(
            name_scopes="['', 'model', 'model.layers.0', 'model.layers.0.mlp', "
            "'model.layers.0.mlp.up_proj', 'linear_5']",
            class_hierarchy="['a.LlamaForCausalLM', 'a.LlamaModel', 'a.LlamaDecoderLayer', 'a.LlamaMLP', "
            "'torch.nn.modules.linear.Linear', 'aten.linear.default']",
            stack_trace=f'File "{INSTALLED}/transformers/models/llama/modeling_llama.py", line 311, in forward\n'
            "    hidden_states = self.mlp(hidden_states)\n"
            f'  File "{INSTALLED}/transformers/models/llama/modeling_llama.py", line 164, in forward\n'
            "    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
            f'  File "{INSTALLED}/torch/nn/modules/linear.py", line 134, in forward\n'
            "    return F.linear(input, self.weight, self.bias)",
        )
    )
    assert found == NodeSource(
        "node_add_3", "model.layers.0.mlp.up_proj", "Linear", "llama/modeling_llama.py:164 forward"
    )


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param(node("/model/layers.0/mlp/Mul"), ("model.layers.0.mlp", None, None), id="torchscript"),
        pytest.param(node(name_scopes="['', 'add']"), ("", None, None), id="the model itself"),
        pytest.param(
            node(name_scopes="['', 'add']", class_hierarchy="['my.Net', 'aten.add']"), ("", "Net", None), id="its class"
        ),
        pytest.param(
            node(stack_trace='File "C:\\work\\net.py", line 7, in forward'),
            (None, None, "work/net.py:7 forward"),
            id="windows",
        ),
        pytest.param(
            node(stack_trace='File "/home/me/torch/net.py", line 7, in forward'),
            (None, None, "torch/net.py:7 forward"),
            id="a folder of one's own that is named torch",
        ),
    ],
)
def test_each_exporter_leaves_another_part(made: onnx.NodeProto, expected: tuple[str | None, ...]) -> None:
    assert source_of(made) == NodeSource(made.name, *expected)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(node(), id="nothing"),
        pytest.param(node("/Add"), id="a node of the graph itself"),
        pytest.param(
            node(
                name_scopes="['_empty_nn_module_stack_from_metadata_hook', 'sym_size_int_26']",
                class_hierarchy="['_empty_nn_module_stack_from_metadata_hook', 'aten.sym_size.int']",
                stack_trace='File "torch/fx/passes/runtime_assert.py", line 24, in insert_deferred_runtime_asserts',
            ),
            id="made by the exporter",
        ),
        pytest.param(node(name_scopes="__import__('os').system('true')", stack_trace="no trace"), id="no list"),
        pytest.param(node(name_scopes="[" * 100_000, stack_trace='File "' * 100_000), id="deep and long"),
        pytest.param(node(name_scopes="[" * 5_000), id="deep"),
        pytest.param(node(name_scopes=repr(["", "m" * 300, "add"])), id="a name of 300 characters"),
        pytest.param(node(name_scopes="['', 1, 'add']", stack_trace='File "a.py", line x, in f'), id="other types"),
    ],
)
def test_what_tells_nothing_is_left_out(made: onnx.NodeProto) -> None:
    assert source_of(made) is None


def test_nodes_of_one_name_must_agree() -> None:
    def view(*nodes: onnx.NodeProto) -> GraphView:
        return GraphView(helper.make_model(helper.make_graph(list(nodes), "g", [], [])))

    one, same, other = (node("n", name_scopes=f"['', 'model.{name}', 'add']") for name in ("a", "a", "b"))
    assert [found.module for found in find_sources(["n"], [view(one, same)])] == ["model.a"]
    assert find_sources(["n"], [view(one, other)]) == ()
    assert [found.module for found in find_sources(["n", "n"], [view(node()), view(other), view(one)])] == ["model.b"]


def in_every_format(model: Path, scratch: Path) -> dict[str, str]:
    """The report of one run in each format."""
    names = ("html", "markdown", "junit", "github", "json", "sarif")
    more = [option for name in names for option in ("--output", f"{name}={scratch / name}")]
    out = kvdoctor("step-test", str(model), *more)[1]
    return {"text": out, **{name: (scratch / name).read_text(encoding="utf-8") for name in names}}


def test_every_format_leads_to_the_line(tmp_path: Path) -> None:
    written = in_every_format(load_all()["mask-not-offset-dynamo"].write(tmp_path / "model"), tmp_path)
    assert f"  module     {WORDS}\n" in written["text"]
    for name in ("html", "markdown", "junit", "github"):
        assert "modeling_llama.py:257" in written[name].replace("\\", ""), name
    report = json.loads(written["json"])
    assert report["findings"][0]["sources"] == [
        {
            "node": "node_add_3",
            "module": "model.layers.1.self_attn",
            "kind": "LlamaAttention",
            "line": "llama/modeling_llama.py:257 forward",
        }
    ]
    result = json.loads(written["sarif"])["runs"][0]["results"][0]
    assert f"module: {WORDS}" in result["message"]["text"]
    assert {"name": "model.layers.1.self_attn", "kind": "module"}.items() <= result["locations"][0]["logicalLocations"][
        -1
    ].items()


def test_an_inspection_names_the_module_of_a_node(tmp_path: Path) -> None:
    model = load_all()["step-fails-expand"].write(tmp_path)
    _, text = kvdoctor("inspect", model, "-v")
    assert ["module", "decoder.layers.0.self_attn"] in [line.split() for line in text.splitlines()]


def test_hostile_metadata_are_escaped(tmp_path: Path) -> None:
    model = load_all()["mask-not-offset-dynamo"].write(tmp_path / "model")
    graph = onnx.load(model / "model.onnx")
    hostile = next(one for one in graph.graph.node if one.name == "node_add_3")
    for entry in hostile.metadata_props:
        entry.value = entry.value.replace("self_attn", "\x1b[31m<b>").replace("modeling_llama", "\u202e<i>")
    onnx.save(graph, model / "model.onnx")
    written = in_every_format(model, tmp_path)
    for name in ("text", "html", "markdown", "sarif"):
        out = written[name]
        assert "x1b" in out, name
        assert "\x1b" not in out, name
        assert "\u202e" not in out, name
        assert name != "html" or "<b>" not in out.partition("x1b")[2][:40]
