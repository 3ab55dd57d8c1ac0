"""Finds the graph that makes the embeddings of a decoder, in a file next to it: by its interface.

A decoder that takes embeddings says which ones: their element type and their width. An embedding graph takes token ids,
and returns these for each of them. Suffixes (`_q4`) and names decide only between files that fit equally; where nothing
decides, none is taken.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.configs import embeddings_width, read_part
from kvdoctor.analysis.dialects.dialect import parse_axes
from kvdoctor.analysis.port_roles import FLOATS, INTEGERS, convert_sizes, find_token_inputs, plain_port, role_by_name
from kvdoctor.analysis.stacks import OnnxFile, PartProblem, StackFiles, StackParts
from kvdoctor.contract import Graph, Port, describe
from kvdoctor.model.files import sha256
from kvdoctor.model.operators import operators_with
from kvdoctor.model.view import Declared, GraphView

NAME = re.compile(r"embed_tokens|(token_|text_|input_)?embeddings?|prepare_inputs_embeds", re.ASCII)
"""How exporters call the file: transformers.js, onnxruntime-genai, Optimum."""
VARIANT = re.compile(r"_(q\d\w*|b?fp?\d+|u?int\d+|quantized|bnb\d+)$", re.ASCII)
MIXING = operators_with("softmax", "recurrent", "attend", "loop")
"""Operators by which a token's output depends on other tokens: no embedding does."""
WIDTH_AXIS = 2
"""The first axis after batch and tokens."""


def add_embedding_graphs(
    files: tuple[OnnxFile, ...], stacks: tuple[StackFiles, ...], config: dict[str, Any], genai: dict[str, Any]
) -> tuple[tuple[OnnxFile, ...], tuple[StackFiles, ...]]:
    """The files and stacks of a folder, with the embedding graphs as part of the stacks that need one."""
    used = {file.name for stack in stacks for file in stack.members}
    candidates = [replace(f, role="embedding") for f in files if f.name not in used and _is_embedding_graph(f)]
    if not candidates:
        return files, stacks
    stacks = tuple(_add_to_stack(stack, candidates, StackParts.of(stack, config, genai), genai) for stack in stacks)
    taken = {stack.files["embedding"].name for stack in stacks if "embedding" in stack.files}
    return tuple(replace(f, role="embedding") if f.name in taken else f for f in files), stacks


def find_embedded_input(stack: StackFiles, config: dict[str, Any], genai: dict[str, Any]) -> Port | None:
    """The input of a decoder that takes the embeddings of tokens, float[batch, new, width]; None without a width."""
    if stack.operator is not None:
        return None
    parts = StackParts.of(stack, config, genai)
    if any(
        role_by_name(port, parts.rules("inputs")) == "encoder_states" for port in parts.decode.graph.inputs.values()
    ):
        return None  # images and audio go into the encoder, whose states the decoder takes
    port = next((one for one in _embeddings_of(parts.decode, parts) if len(one.shape or ()) == WIDTH_AXIS + 1), None)
    if port is None or port.shape is None:
        return None
    width = port.shape[WIDTH_AXIS] if isinstance(port.shape[WIDTH_AXIS], int) else embeddings_width(config)
    return replace(port, shape=(*port.shape[:WIDTH_AXIS], width)) if width is not None else None


def read_embedding_graph(file: OnnxFile, decoders: Iterable[Graph]) -> Graph | None:
    """The ports of an embedding graph; None where some of the decoder's graphs takes other embeddings."""
    from kvdoctor.decode.embeddings import pair_embeddings  # loads numpy

    outputs = [_output(port) for port in file.graph.outputs.values()]
    taken: set[str] = set()
    for decoder in decoders:
        wanted = [port for port in decoder.inputs if port.role == "embeddings"]
        pairs = pair_embeddings(wanted, outputs)
        if not pairs and wanted:
            return None
        taken |= set((pairs or {}).values())
    ports = (p if p.name in taken else replace(p, role="auxiliary") for p in outputs)
    inputs = (
        Port(port.name, port.dtype, port.shape, "token_ids", ("batch", "new"))
        if port.dtype in INTEGERS
        else plain_port(port, "features")
        for port in file.graph.inputs.values()
    )
    return Graph(file.name, tuple(map(convert_sizes, inputs)), tuple(ports))


def _is_embedding_graph(file: OnnxFile) -> bool:
    """Whether a file takes token ids, at most features in addition, and returns floats for each token."""
    view = file.view
    if view is None or file.role not in ("other", "encoder") or "encoder" in file.path.stem.lower():
        return False
    ids = _token_ids(view)
    rest = [port for port in view.inputs.values() if port is not ids]
    outputs = view.outputs.values()
    if ids is None or not outputs or any(port.dtype not in FLOATS for port in (*rest, *outputs)):
        return False
    if any(all(isinstance(as_number(size), int) for size in port.shape or ()) for port in rest):
        return False  # an input of fixed sizes takes no features, of which there may be none
    mixes = any("Attention" in name or name in MIXING for name in view.operators)
    return not mixes and all(len(port.shape or ()) > WIDTH_AXIS for port in outputs)


def _token_ids(view: GraphView) -> Declared | None:
    """The only input of integers, which has an entry for each token."""
    integers = [port for port in view.inputs.values() if port.dtype in INTEGERS]
    return integers[0] if len(integers) == 1 and len(integers[0].shape or ()) == WIDTH_AXIS else None


def _output(port: Declared) -> Port:
    """An output as embeddings; sizes after batch and tokens are numbers also where they are written as names."""
    shape = port.shape or ()
    widths = tuple(map(as_number, shape[WIDTH_AXIS:]))
    axes = parse_axes("BQD" if len(widths) == 1 else "BQ" + "1" * len(widths))
    return Port(port.name, port.dtype, (*shape[:WIDTH_AXIS], *widths), "embeddings", axes)


def _add_to_stack(
    stack: StackFiles, candidates: Sequence[OnnxFile], parts: StackParts, genai: dict[str, Any]
) -> StackFiles:
    """The stack with its embedding graph, or with the reason why none is taken."""
    if stack.operator is not None:
        return stack
    files = [parts.decode] if parts.first is parts.decode else [parts.decode, parts.first]
    wanted = [ports for ports in (_embeddings_of(file, parts) for file in files) if ports]
    if not wanted:
        return stack
    model = read_part(genai, "model")  # of genai_config.json, which may name the embedding graph of a decoder
    decoder, embedding = (read_part(model, part).get("filename") for part in ("decoder", "embedding"))
    named = [one for one in candidates if one.name == embedding and stack.main.name == decoder]
    fitting = [one for one in named or candidates if all(_fits(one, ports) for ports in wanted)]
    if not fitting:
        return replace(stack, problems=(*stack.problems, *_misfits(stack.main, named or candidates, wanted[0])))
    best = min(_preference(one, stack.main, wanted[0]) for one in fitting)
    chosen = [one for one in fitting if _preference(one, stack.main, wanted[0]) == best]
    if len(chosen) > 1 and len({sha256(one.path) for one in chosen}) > 1:
        names = " and ".join(one.name for one in chosen[:3])
        reason = f"{names} both make embeddings for {stack.main.name} and differ in content: none of them is used"
        return replace(stack, remarks=(reason,))
    return replace(stack, files={**stack.files, "embedding": chosen[0]})


def _embeddings_of(file: OnnxFile, parts: StackParts) -> list[Port]:
    """The inputs of a decoder that take embeddings; none where it takes token ids as well."""
    tokens = find_token_inputs(parts)
    if tokens.ids[file.name] is not None:
        return []
    found = []
    for port in file.graph.inputs.values():
        known = parts.known.find_role(port)
        role = known.role if known is not None else role_by_name(port, parts.rules("inputs"))
        if role == "embeddings" or port.name == tokens.hidden:
            found.append(convert_sizes(plain_port(port, "embeddings")))
    return found


def _fits(file: OnnxFile, wanted: Sequence[Port]) -> bool:
    """Whether a file makes all embeddings that a decoder takes, for as many sequences and tokens."""
    from kvdoctor.decode.embeddings import pair_embeddings  # loads numpy

    ids = _token_ids(file.graph)
    assert ids is not None  # noqa: S101 - candidates have them
    fixed = [(index, size) for index, size in enumerate(map(as_number, ids.shape or ())) if isinstance(size, int)]
    if any((port.shape or ())[index : index + 1] != (size,) for index, size in fixed for port in wanted):
        return False
    return pair_embeddings(wanted, [_output(port) for port in file.graph.outputs.values()]) is not None


def _preference(file: OnnxFile, decoder: OnnxFile, wanted: Sequence[Port]) -> tuple[int, bool, bool]:
    """What makes a file the likelier one, the least first: the decoder's suffix, the outputs' names, its own name."""
    stem, variant = file.path.stem, VARIANT.search(decoder.path.stem)
    own = {decoder.suffix, *([variant[0]] if variant else [])}
    # The name without the known terms for the file's role: `_q4` of `embed_tokens_q4.onnx`.
    named, part = NAME.match(stem), VARIANT.search(stem)
    suffix = stem[named.end() :] if named else part[0] if part else ""
    return (
        0 if suffix in own else 1 if not suffix else 2,
        not {port.name for port in wanted} <= set(file.graph.outputs),
        named is None,
    )


def _misfits(decoder: OnnxFile, candidates: Sequence[OnnxFile], wanted: Sequence[Port]) -> Iterator[PartProblem]:
    """Why the file that is called an embedding graph, if there is one, is not that of a decoder.

    A file of another variant may be meant for a decoder that is not there. Where each input has an output of its type
    and width, and several of them leave open which, nothing is known to be wrong.
    """
    named = [one for one in candidates if NAME.match(one.path.stem)]
    for one in sorted(named, key=lambda file: _preference(file, decoder, wanted))[:1]:
        made = ", ".join(f"{p.name} {describe(p.dtype, p.shape)}" for p in map(_output, one.graph.outputs.values()))
        taken = ", ".join(f"{port.name} {describe(port.dtype, port.shape)}" for port in wanted)
        same = _preference(one, decoder, wanted)[0] == 0
        outputs = [_output(port) for port in one.graph.outputs.values()]
        unclear = all(any(_may_feed(output, port) for output in outputs) for port in wanted)
        yield PartProblem(
            subject=one.name,
            declared=f"{decoder.name} takes {taken}",
            observed=f"{one.name} returns {made}",
            cause=f"the embeddings of {one.name} do not fit {decoder.name}",
            essential=False,
            severity="note" if unclear else "error" if same else "warning",
        )


def _may_feed(output: Port, wanted: Port) -> bool:
    """Whether an output has the type and the widths of an input, where both declare them."""
    pairs = zip((output.shape or ())[WIDTH_AXIS:], (wanted.shape or ())[WIDTH_AXIS:], strict=False)
    known = ((one, other) for one, other in pairs if isinstance(one, int) and isinstance(other, int))
    return output.dtype == wanted.dtype and all(one == other for one, other in known)
