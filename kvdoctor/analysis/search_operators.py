"""Reads how a search operator is called: which inputs of the graph it takes, and what the file fixes.

Source: the schemas of com.microsoft BeamSearch, GreedySearch, Sampling and WhisperBeamSearch, ONNX Runtime 1.32.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdoctor.analysis.arithmetic.numbers import read_numbers
from kvdoctor.analysis.port_roles import plain_port
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Graph
from kvdoctor.model.operators import CONTRIB, has, operators_with
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import find_attribute
from kvdoctor.model.view import GraphView

if TYPE_CHECKING:
    from kvdoctor.decode.search import SearchPlan

GREEDY = (
    "input_ids",
    "max_length",
    "min_length",
    "repetition_penalty",
    "vocab_mask",
    "prefix_vocab_mask",
    "attention_mask",
    "presence_mask",
    "seed",
)
SETTINGS = ("num_beams", "num_return_sequences", "length_penalty")
WHISPER = ("decoder_input_ids", "logits_processor", "cross_qk_layer_head", "extra_decoding_ids", "temperature")
BEAM = (*GREEDY[:3], *SETTINGS, *GREEDY[3:7], *WHISPER)
INPUTS = {"GreedySearch": GREEDY, "Sampling": GREEDY, "BeamSearch": BEAM, "WhisperBeamSearch": BEAM}
"""The inputs of each operator, in order."""
ONES = ("vocab_mask", "prefix_vocab_mask", "attention_mask")
"""Masks that leave everything as it is where they are ones."""
NEUTRAL = {"logits_processor": 0.0, "temperature": 1.0}
"""Settings that change nothing at these numbers."""
KNOWN = (*GREEDY[:7], *SETTINGS, "decoder_input_ids", *NEUTRAL)
"""Inputs whose effect is known; a search with another one is not computed."""
RANDOM = "Sampling"
GPT = 0
"""The `model_type` of a decoder without an encoder."""


def read_search(file: OnnxFile) -> "SearchPlan":
    """The plan of the operator in a file's main graph."""
    from kvdoctor.decode.search import SearchPlan  # loads numpy

    view = file.graph
    node = next(n for n in view.model.graph.node if n.domain == CONTRIB and has(n.op_type, "search"))
    scope = view.main
    fed, fixed, unknown = dict[str, str](), dict[str, float](), list[str]()
    for name, value in zip(INPUTS[node.op_type], node.input, strict=False):
        if not value:
            continue
        source = scope.through(value, operators_with("cast", "copy"))
        tensor = scope.constant(source)
        if source in view.inputs:
            fed[name] = source
        elif tensor is not None and name not in ONES and len(numbers := read_numbers(tensor) or ()) == 1:
            fixed[name] = numbers[0]
        else:
            unknown.append(f"its input {name} is computed in the graph")
    unknown += _find_unknown(node, view, fed, fixed)
    return SearchPlan(
        operator=node.op_type,
        fed=fed,
        fixed=fixed,
        prompts=_integer(node, "model_type", GPT) != GPT,
        eos=_integer(node, "eos_token_id", -1),
        pad=_integer(node, "pad_token_id", 0),
        start=_integer(node, "decoder_start_token_id", -1),
        early_stopping=_integer(node, "early_stopping", 0) == 1,
        ngram=_integer(node, "no_repeat_ngram_size", 0),
        sequences=_output(node, view, 0) or "",
        scores=_output(node, view, 1) if "Beam" in node.op_type else None,
        unknown="; ".join(unknown[:1]),
        vocabulary=_integer(node, "vocab_size", -1),
    )


def read_search_graph(file: OnnxFile, path: str) -> Graph:
    """The graph of the whole model, as a call of it needs it."""
    inputs, outputs = file.graph.inputs.values(), file.graph.outputs.values()
    given, returned = (tuple(plain_port(port, "auxiliary") for port in ports) for ports in (inputs, outputs))
    return Graph(path, given, returned)


def _find_unknown(node: NodeProto, view: GraphView, fed: dict[str, str], fixed: dict[str, float]) -> Iterator[str]:
    """Why the search cannot be computed by its definition."""
    if node.op_type == RANDOM:
        yield "it draws its tokens at random"
    for name in (*fed, *fixed):
        if name not in KNOWN or fixed.get(name, NEUTRAL.get(name)) != NEUTRAL.get(name, fixed.get(name)):
            yield f"its input {name} has an effect that is not computed"
    if "input_ids" not in fed:
        yield "its prompt is computed in the graph"
    if left := [name for name in view.inputs if name not in fed.values()]:
        yield f"the graph takes {left[0]}, which does not go into it"
    if _output(node, view, 0) is None:
        yield "the graph does not return its sequences as they are"


def _output(node: NodeProto, view: GraphView, index: int) -> str | None:
    """The output of the graph that an output of the node is, if it is one."""
    name = node.output[index] if index < len(node.output) else ""
    return name if name and name in view.outputs else None


def _integer(node: NodeProto, name: str, default: int) -> int:
    attribute = find_attribute(node, name)
    return attribute.i if attribute is not None else default
