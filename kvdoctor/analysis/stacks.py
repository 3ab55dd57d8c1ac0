"""From files to stacks: the role of each file, and which files decode together.

A stack is a merged decoder with its encoder, a first-step graph with the graph that takes its cache, or one decoder
that takes a past of any length; each variant (`_q4`, `_fp16`, ...) is a stack of its own. A decoder that takes
embeddings has its embedding graph as well (embedding_graphs.py).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from kvdoctor.analysis.configs import ConfigFacts, read_codebooks, read_config_facts, read_part
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.dialects.dialect import COMMON, ENCODER_LIKE, Dialect, RoleRule, find_dialect
from kvdoctor.contract import Stage
from kvdoctor.errors import UnreadableError
from kvdoctor.model.external_data import ExternalFile, ExternalProblem
from kvdoctor.model.files import STEM
from kvdoctor.model.flatten import TooLarge
from kvdoctor.model.flow import flow_of
from kvdoctor.model.join import NotClosed, cut_out
from kvdoctor.model.operators import CONTRIB, has
from kvdoctor.model.proto import GraphProto, ModelProto
from kvdoctor.model.skeleton import Skeleton
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

FileRole = Literal[
    "encoder",
    "embedding",
    "vision-encoder",
    "audio-encoder",
    "decoder",
    "decoder-with-past",
    "decoder-merged",
    "generator",
    "other",
    "unreadable",
]
INPUT_ROLES: tuple[FileRole, ...] = ("encoder", "embedding", "vision-encoder", "audio-encoder")
"""Roles of files that belong to a stack and do not decode."""
StackKind = Literal["merged", "pair", "decoder-only", "unpaired", "operator"]

NAMED_ROLES: dict[str, FileRole] = {
    "encoder_model": "encoder",
    "decoder_model_merged": "decoder-merged",
    "decoder_with_past_model": "decoder-with-past",
    "decoder_model": "decoder",
}
PART_WORDS = re.compile(
    r"uncached|cached|decoder_with_past|with_past|encoder_decoder_init|decoder_init|encoder|decoder|decode|prefill"
    r"|init|merged|model",
    re.ASCII | re.IGNORECASE,
)
FLOATS = {"float", "float16", "bfloat16", "double", "uint8", "int8"}


@record(slots=False)
class OnnxFile:
    """One ONNX file. `name` is its path relative to the folder, with forward slashes."""

    path: Path
    name: str
    role: FileRole
    skeleton: Skeleton | None = None
    view: GraphView | None = None
    problem: UnreadableError | None = None
    external: tuple[ExternalFile, ...] = ()
    external_problems: tuple[ExternalProblem, ...] = ()

    @property
    def suffix(self) -> str:
        """The name without the terms for the file's role: `_q4` of `decoder_model_q4.onnx`."""
        match = STEM.fullmatch(self.path.stem)
        if match:
            return match["suffix"] or ""
        rest = PART_WORDS.sub("", self.path.stem).strip("-_. ")
        return f"_{rest}" if rest else ""

    @property
    def graph(self) -> GraphView:
        """The graph of a readable file; stacks have no others."""
        assert self.view is not None  # noqa: S101 - unreadable files are in no stack
        return self.view

    @property
    def sequences(self) -> tuple[str, ...]:
        """The inputs and outputs of the file that are sequences of tensors; the graph has their elements."""
        return self.skeleton.sequences if self.skeleton is not None else ()

    @property
    def dataflow(self) -> Dataflow | None:
        """The dataflow when the cache is used; None where the graph is too large to be followed."""
        return follow_graph(self.view) if self.view is not None else None

    @property
    def first_dataflow(self) -> Dataflow | None:
        """The dataflow of the first step: of a merged decoder, that of the no-past branch."""
        return follow_graph(self.view, cached=self.view.branches is None) if self.view is not None else None


@record
class PartProblem:
    """A part that is missing or does not fit: the file or input at fault, what each side says, and the cause.

    `essential` says that the stack cannot be run. A problem that declares nothing is no fault, and only keeps the
    stack from being run.
    """

    subject: str
    declared: str
    observed: str
    cause: str
    essential: bool = True
    severity: Literal["note", "warning", "error"] = "error"


@record(slots=False)
class StackFiles:
    """The files of one stack by role. `name` is unique in the folder; `suffix` included.

    `remarks` say why a file that looks like a part of the stack is none. Of a pipeline, `files` has its graphs joined
    as one, `parts` are the files themselves, and `stages` say how they are run. `problems` are parts that are missing
    or do not fit.
    """

    name: str
    kind: StackKind
    files: dict[FileRole, OnnxFile]
    operator: str | None = None
    remarks: tuple[str, ...] = ()
    parts: tuple[OnnxFile, ...] = ()
    stages: tuple[Stage, ...] = ()
    problems: tuple[PartProblem, ...] = ()

    @property
    def members(self) -> tuple[OnnxFile, ...]:
        """The files on disk: the stages of a pipeline in place of the graph that they are joined to."""
        rest = (file for role, file in self.files.items() if not self.parts or role in INPUT_ROLES)
        return (*self.parts, *rest)

    @property
    def is_pair(self) -> bool:
        """Whether one graph makes the cache that another one takes."""
        return self.kind == "pair" or (self.operator is not None and "decoder-with-past" in self.files)

    @property
    def main_role(self) -> FileRole:
        """The role of the file that decodes with the cache."""
        roles: tuple[FileRole, ...] = ("decoder-merged", "decoder-with-past", "decoder")
        return next(role for role in roles if role in self.files)

    @property
    def main(self) -> OnnxFile:
        """The file that decodes with the cache."""
        return self.files[self.main_role]


@record(slots=False)
class StackParts:
    """A stack with the names and the configs that apply to it: what the readers of its contract need.

    `decode` takes the cache, `first` serves the first step; they are the same file except in a pair.
    """

    decode: OnnxFile
    first: OnnxFile
    encoder: OnnxFile | None
    dialect: Dialect | None
    known: ConfigFacts
    config: dict[str, Any]

    @classmethod
    def of(cls, stack: StackFiles, config: dict[str, Any], genai: dict[str, Any]) -> "StackParts":
        """Gather the parts of a stack; `config` and `genai` are its config.json and genai_config.json."""
        decode = stack.main
        first = stack.files.get("decoder", decode) if stack.is_pair else decode
        dialect = find_dialect(decode.graph.inputs)
        return cls(decode, first, stack.files.get("encoder"), dialect, read_config_facts(config, genai), config)

    def rules(self, ports: Literal["inputs", "outputs", "encoder_inputs"]) -> tuple[RoleRule, ...]:
        """Names of a decoder's or an encoder's ports, those of the dialect first."""
        return (*getattr(self.dialect, ports, ()), *COMMON[ports])

    @property
    def codebooks(self) -> int | None:
        """The number of codebooks that the config of an audio decoder declares."""
        return read_codebooks(self.config)


def role_of(path: Path, view: GraphView) -> FileRole:
    """The role of a file, by its graph; its name decides only between graphs that look the same."""
    if decoding_operator(view) is not None:
        return "generator"
    match = STEM.fullmatch(path.stem)
    named = NAMED_ROLES.get(match["stem"]) if match else None
    if takes_past(view):
        if view.branches is not None:
            return "decoder-merged"
        return "decoder-with-past" if named == "decoder-with-past" else "decoder"
    encoder_like = named == "encoder" or any(ENCODER_LIKE.fullmatch(name) for name in view.outputs)
    if has_named_logits(view) and _returns_cache(view):
        return "decoder"
    if encoder_like or "encoder" in path.stem.lower():
        return "encoder"
    if _returns_cache(view):
        return "decoder"
    return "other"


def takes_past(view: GraphView) -> bool:
    """Whether inputs are named like a cache, or reach an attention and an output."""
    named = _has_cache_names(view.inputs) or find_dialect(view.inputs) is not None
    return named or _carries_states(view) or _replaces_states(view)


def has_named_logits(view: GraphView) -> bool:
    """Whether the graph has an output that is named as logits."""
    return any(name in ("logits", "output.logits") for name in view.outputs)


def decoding_operator(view: GraphView) -> str | None:
    """The operator of the main graph that runs the whole decode loop (`BeamSearch`, ...), if there is one."""
    found = (n.op_type for n in view.model.graph.node if n.domain == CONTRIB and has(n.op_type, "search"))
    return next(found, None)


def group_stacks(files: tuple[OnnxFile, ...], genai: dict[str, Any]) -> Iterator[StackFiles]:
    """Group files into stacks: as genai_config.json says, else by suffix as merged, pair and single decoders."""
    configured = _find_configured(files, genai)
    if configured is not None:
        yield configured
        used = {file.name for file in configured.files.values()}
        files = tuple(file for file in files if file.name not in used)
    encoders = {file.suffix: file for file in files if file.role == "encoder"}
    for suffix in sorted({file.suffix for file in files}):
        mine = [file for file in files if file.suffix == suffix]
        encoder = encoders.get(suffix) or encoders.get("")
        shared: dict[FileRole, OnnxFile] = {"encoder": encoder} if encoder else {}
        yield from _group_variant(mine, shared, suffix.replace("_", "-"))


def _group_variant(mine: list[OnnxFile], shared: dict[FileRole, OnnxFile], tail: str) -> Iterator[StackFiles]:
    """The stacks of files with one suffix; `shared` has the encoder, `tail` is the end of the stacks' names."""
    merged = [file for file in mine if file.role == "decoder-merged"]
    for file in merged:
        name = "merged" if len(merged) == 1 else f"merged-{file.path.stem}"
        yield StackFiles(name + tail, "merged", {"decoder-merged": file, **shared})
    for file in (file for file in mine if file.role == "generator"):
        yield _open_operator(file, tail)
    pair = _find_pair(mine)
    if pair is not None:
        first, later = pair
        yield StackFiles("pair" + tail, "pair", {"decoder": first, "decoder-with-past": later, **shared})
    alone = next((f for f in mine if f.role == "decoder-with-past" and pair is None), None)
    if alone:
        # Without a cross-attention cache the file can take an empty past, and needs no first-step graph.
        crossed = any(".encoder." in name for name in alone.view.inputs) if alone.view else False
        kind: StackKind = "unpaired" if crossed else "decoder-only"
        yield StackFiles("with-past" + tail, kind, {"decoder-with-past": alone, **shared})
    paired = {file.name for file in pair or ()}
    for file in (f for f in mine if f.role == "decoder" and f.name not in paired):
        named = STEM.fullmatch(file.path.stem)
        assert file.view is not None  # noqa: S101 - only read files have the role
        if takes_past(file.view):
            name = "decoder" if named or not PART_WORDS.sub("", file.path.stem).strip("-_. ") else file.path.stem
            yield StackFiles(name + tail if named else name, "decoder-only", {"decoder": file, **shared})
        elif not (named and (merged or pair)):
            # The no-past graph alone. Next to a merged decoder it is a copy of one of its branches.
            yield StackFiles("first-step" + tail, "unpaired", {"decoder": file, **shared})


def _find_pair(mine: list[OnnxFile]) -> tuple[OnnxFile, OnnxFile] | None:
    """The graph that first computes the cache, and the one that takes it."""
    with_past = next((file for file in mine if file.role == "decoder-with-past"), None)
    named = next((f for f in mine if f.role == "decoder" and NAMED_ROLES.get(_stem(f)) == "decoder"), None)
    if with_past and named:
        return named, with_past
    decoders = [file for file in mine if file.role == "decoder" and _stem(file) not in ("model", "decoder_model")]
    takers = [file for file in decoders if file.view and takes_past(file.view)]
    first_steps = [file for file in decoders if file not in takers]
    by_name = {_stem(file): file for file in decoders}
    if {"prefill", "decode"} <= set(by_name):
        return by_name["prefill"], replace(by_name["decode"], role="decoder-with-past")
    if len(takers) == 1 and len(first_steps) == 1:
        return first_steps[0], replace(takers[0], role="decoder-with-past")
    return None


def _stem(file: OnnxFile) -> str:
    match = STEM.fullmatch(file.path.stem)
    return match["stem"] if match else file.path.stem


def _find_configured(files: tuple[OnnxFile, ...], genai: dict[str, Any]) -> StackFiles | None:
    """The stack that genai_config.json describes; pipelines of several graphs are not supported."""
    model, by_name = read_part(genai, "model"), {file.name: file for file in files if file.view is not None}
    named = {part: str(read_part(model, part).get("filename")) for part in ("decoder", "encoder")}
    decoder = by_name.get(named["decoder"])
    if decoder is None:
        return None
    chosen: dict[FileRole, OnnxFile] = {"decoder": decoder}
    if encoder := by_name.get(named["encoder"]):
        chosen["encoder"] = replace(encoder, role="encoder")
    return StackFiles("decoder", "decoder-only", chosen)


def _open_operator(file: OnnxFile, tail: str) -> StackFiles:
    """The stack inside an operator that runs the whole loop: its subgraphs as models.

    An encoder that returns logits is the first step as well: it and the decoder are a pair.
    """
    assert file.view is not None  # noqa: S101 - only read files have the role
    operator, problems = decoding_operator(file.view), list[PartProblem]()
    chosen: dict[FileRole, OnnxFile] = {}
    bodies = operator_bodies(file.view.model)
    for part, body in bodies.items():
        try:
            view = GraphView(cut_out(file.view.model, body))
        except NotClosed as reason:
            cause = f"the {part} inside {operator} cannot be run by itself: {reason}"
            problems.append(PartProblem(file.name, "", "", cause, essential=False))
            view = GraphView(ModelProto(opset_import=file.view.model.opset_import, graph=body))
        # The readers of a contract tell the graphs of a pair by their names.
        shown = f"{file.name}#encoder" if part == "decoder" and "decoder-with-past" in bodies else file.name
        chosen[part] = replace(file, name=shown, view=view, role=part)
    if not {"decoder", "decoder-with-past"} & set(chosen):
        chosen["decoder"] = file
    name = f"{file.path.stem}{tail if STEM.fullmatch(file.path.stem) else ''}"
    return StackFiles(name, "operator", chosen, operator, problems=tuple(problems))


def operator_bodies(model: ModelProto) -> dict[FileRole, GraphProto]:
    """The subgraphs of the operator that runs the whole loop, by their roles; a second first step is left out."""
    node = next(n for n in model.graph.node if n.domain == CONTRIB and has(n.op_type, "search"))
    bodies = {attribute.name: attribute.g for attribute in node.attribute if attribute.HasField("g")}
    found: dict[FileRole, GraphProto] = {}
    if "encoder" in bodies and has_named_logits(GraphView(ModelProto(graph=bodies["encoder"]))):
        found["decoder"] = bodies.pop("encoder")
    elif "encoder" in bodies:
        found["encoder"] = bodies.pop("encoder")
    if "decoder" in bodies:
        found["decoder-with-past" if "decoder" in found else "decoder"] = bodies["decoder"]
    return found


def follow_graph(view: GraphView, cached: bool = True) -> Dataflow | None:
    """The dataflow of a graph, computed once: of the cached or the no-past branch. None where it is too large."""
    known = _DATAFLOWS.setdefault(view, {})
    if cached not in known:
        try:
            shapes = {name: port.fixed[1] for name, port in view.inputs.items() if port.fixed is not None}
            known[cached] = Dataflow(flow_of(view, cached), shapes)
        except TooLarge:
            known[cached] = None
    return known[cached]


_DATAFLOWS: WeakKeyDictionary[GraphView, dict[bool, Dataflow | None]] = WeakKeyDictionary()


def _carries_states(view: GraphView) -> bool:
    """Whether an input without a known name is a cache: joined by new entries, used by an attention and returned."""
    for name, port in view.inputs.items():
        if port.dtype in FLOATS and port.shape is not None and len(port.shape) >= 3:
            dataflow, rank = follow_graph(view), len(port.shape)
            state = dataflow.state(name, rank) if dataflow is not None else None
            if state and state.joined and (state.output or state.delta) and state.use and state.use.part != "conv":
                return True
            if dataflow is not None and dataflow.computed_state(name, rank) is not None:
                return True
    return False


def _replaces_states(view: GraphView) -> bool:
    """Whether a graph that takes token ids has states of fixed size, returned in their type and shape.

    Vectors and integers are states where the graph returns logits as well.
    """
    ids = [name for name, port in view.inputs.items() if port.dtype in ("int64", "int32")]
    for name, port in view.inputs.items() if ids else ():
        fitting = {out for out, other in view.outputs.items() if other.fixed == port.fixed}
        if not fitting or not port.shape or sum(not isinstance(size, int) for size in port.shape) > 1:
            continue
        dataflow, rank = follow_graph(view), len(port.shape)
        if dataflow is None or rank < 2 or (rank < 3 and not makes_logits(view, dataflow)):
            continue
        if port.dtype in FLOATS and dataflow.descent.find_update(name, fitting) is not None:
            return True
        kept = (output for one in ids for output, _ in dataflow.outputs_reached(one, rank))
        if port.dtype not in FLOATS and not fitting.isdisjoint(kept):
            return True
    return False


def makes_logits(view: GraphView, dataflow: Dataflow) -> bool:
    """Whether a float output is as wide as a table of embeddings that integers index has rows."""
    ids = [name for name, port in view.inputs.items() if port.dtype in ("int64", "int32")]
    rows = {dataflow.uses.table_rows(name) for name in ids} - {None}
    wide = [port for port in view.outputs.values() if port.dtype in FLOATS and len(port.shape or ()) > 1]
    return any((port.shape or ())[-1] in rows for port in wide)


def _returns_cache(view: GraphView) -> bool:
    """Whether outputs are named like a cache, or the graph uses them as keys and values."""
    if _has_cache_names(view.outputs):
        return True
    wide = [name for name, port in view.outputs.items() if port.shape is not None and len(port.shape) >= 3]
    if len(wide) < 2:
        return False
    dataflow = follow_graph(view)
    return dataflow is not None and any(dataflow.uses.use_of_output(name) is not None for name in wide)


def _has_cache_names(ports: dict[str, Any]) -> bool:
    return any(name.startswith(("past", "present", "cache_")) or ".past" in name for name in ports)
