"""Reads the ports of a stack's graphs: the role and the axes of each input and output."""

import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.configs import count_position_rows, decoder_config, is_count
from kvdoctor.analysis.dialects.dialect import (
    DECODER_ONLY_NAMES,
    ENCODER_OUTPUTS,
    SHARED_NAMES,
    looks_like_cache,
    parse_axes,
)
from kvdoctor.analysis.port_roles import (
    INTEGERS,
    LOGITS_RANK,
    InputFlow,
    TokenInputs,
    convert_sizes,
    find_logits_widths,
    match_rule,
    plain_port,
    role_by_name,
)
from kvdoctor.analysis.slot_init import shared_pasts
from kvdoctor.analysis.slot_rules import REPLACED
from kvdoctor.analysis.stacks import FLOATS, OnnxFile, StackParts
from kvdoctor.contract import Axis, Graph, MissingPart, Port, Slot
from kvdoctor.model.flow import Flow
from kvdoctor.model.view import Declared

HIDDEN_LIKE = re.compile(r"(.*_)?hidden_states(_.*)?", re.ASCII)
"""Outputs of a stage; `last_hidden_state` is what a decoder without a head returns."""
MOST_UNREAD = 8
"""Inputs that no node reads: an exporter leaves a few; a graph with more of them is not a decoder's."""

POSITION_RANK = 3
"""Of positions int64[rows, batch, new]: Qwen2-VL and its successors."""
IMAGE_CHANNELS = 3
IMAGE_SIZE = 224
"""Of an image whose size neither the graph nor the config gives, in pixels."""

FEATURE_AXES: dict[int, tuple[Axis, ...]] = {
    2: ("batch", "encoder_input"),
    3: ("batch", "fixed", "encoder_input"),
    4: ("batch", "fixed", "fixed", "fixed"),
}
"""Axes of an encoder's unnamed float input by rank: samples, features, an image."""


def _is_read(flow: Flow, name: str) -> bool:
    """Whether a node computes with a value: one that copies it does not."""
    values = [name]
    for value in values:
        users = [node for node, _ in flow.consumers.get(value, ())]
        if value in flow.decides or not all(node.has("copy") for node in users):
            return True
        values += [output for node in users for output in node.outputs if output not in values]
    return False


@dataclass(eq=False, repr=False)
class DecoderPorts:
    """Reads the ports of one decoder graph of a stack. The fields without a value at the start grow while it reads.

    `unknown` are inputs for which neither a name nor the dataflow gives a role, `guessed` those that the dataflow alone
    gives one.
    """

    parts: StackParts
    file: OnnxFile
    slots: tuple[Slot, ...]
    tokens: TokenInputs
    unknown: set[str] = field(default_factory=set, init=False)
    guessed: set[str] = field(default_factory=set, init=False)
    missing: list[MissingPart] = field(default_factory=list, init=False)
    evidence: list[str] = field(default_factory=list, init=False)

    @property
    def ids(self) -> str | None:
        """The input that carries token ids."""
        return self.tokens.ids[self.file.name]

    @cached_property
    def flow(self) -> InputFlow | None:
        """The inputs by their use in the first step; None where the graph cannot be followed."""
        flow, view = self.file.first_dataflow, self.file.graph
        return InputFlow(flow, view.inputs, find_logits_widths(view), self.tokens.hidden) if flow is not None else None

    @cached_property
    def vocabulary(self) -> int | None:
        """Rows of the embedding table that the token ids index; None where there is none."""
        return self.flow.table_rows(self.ids) if self.flow is not None and self.ids is not None else None

    def read(self) -> Graph:
        """Read all inputs and outputs."""
        view, is_decode = self.file.graph, self.file is self.parts.decode
        shared = shared_pasts(self.parts.decode.graph, view, {slot.past for slot in self.slots})
        pasts = {slot.past: slot for slot in self.slots if slot.past in shared}
        ports = [self._read_input(port, pasts) for port in view.inputs.values()]
        ports = [self._with_position_rows(self._by_codebook(convert_sizes(port))) for port in ports]
        # Names count within their graph only: where tensors are numbered, t59 of one is unrelated to t59 of another.
        presents = {slot.present for slot in self.slots if is_decode}
        presents |= {slot.filled_by for slot in self.slots if self.file is self.parts.first}
        outputs = [self._read_output(port, presents) for port in view.outputs.values()]
        if any(port.role in ("token_ids", "token_and_position", "embeddings") for port in ports):
            recurrent = bool(self.slots) and all(slot.kind in REPLACED for slot in self.slots)
            outputs = _mark_logits(outputs, self.vocabulary, recurrent)
        return Graph(self.file.name, tuple(ports), tuple(outputs))

    def _read_input(self, port: Declared, pasts: dict[str, Slot]) -> Port:
        branches = self.file.graph.branches
        if branches is not None and port.name == branches[0]:
            return plain_port(port, "branch_switch")
        if port.name == self.tokens.hidden:
            self.evidence.append(f"{port.name!r} are hidden states in place of token ids: all new keys depend on them")
            return Port(port.name, port.dtype, port.shape, "embeddings", parse_axes("BQD"))
        if port.name in pasts:
            slot = pasts[port.name]
            return Port(port.name, port.dtype, slot.shape, "past", slot.axes)
        found = self._encoder_input(port) or self._input_by_name(port)
        if found is not None and found.role == "setting":
            return self._add_setting(found)
        return found or self._input_by_use(port) or self._unknown_input(port)

    def _encoder_input(self, port: Declared) -> Port | None:
        """An input of the encoder, in a first step that contains it: the decoder's own inputs show whose it is."""
        names = self.file.graph.inputs
        if self.file is not self.parts.first or not SHARED_NAMES.fullmatch(port.name):
            return None
        if "input_ids" not in names or not any(map(DECODER_ONLY_NAMES.fullmatch, names)):
            return None
        return self.parts.known.find_role(port) or match_rule(port, self.parts.rules("encoder_inputs"))

    def _input_by_name(self, port: Declared) -> Port | None:
        found = self.parts.known.find_role(port) or match_rule(port, self.parts.rules("inputs"))
        if port.name == self.ids and (found is None or not found.role.startswith("token")):
            shape = port.shape or ()  # of three axes, the one of a declared size counts codebooks
            three = "BQc" if isinstance((shape or (0,))[-1], int) else "BcQ"
            axes = parse_axes({2: "BQ", 3: three}.get(len(shape), "Q" * len(shape)))
            return Port(port.name, port.dtype, port.shape, "token_ids", axes)
        if found is not None and found.role == "attention_mask" and self.flow is not None and self._cross_sites:
            sites = self.flow.mask_sites(port.name)
            if sites and sites <= self._cross_sites:
                return replace(found, role="encoder_mask", axes=("batch", "encoder"))
        return found

    def _input_by_use(self, port: Declared) -> Port | None:
        """An input without a known name, by its use; in a graph for the first step alone, also one of the encoder."""
        if self.flow is not None and not looks_like_cache(port.name, port.shape):
            found = self.flow.find_role(port.name, self._cross_sites)
            if found is not None and found[0] == "position_ids" and self._has_other_length(port):
                return None
            known = role_by_name(port, self.parts.rules("inputs")) is not None
            if found is not None and not (found[0] == "setting" and known):
                self.evidence.append(f"{port.name!r} is {found[0]} by its use in the graph")
                self.guessed.add(port.name)
                # A kind of tokens (a segment, a language): 0 for all of them.
                value = 0.0 if found[0] == "setting" else None
                return Port(port.name, port.dtype, port.shape, *found, value=value)
        if self.file is self.parts.first and self.file is not self.parts.decode:
            return match_rule(port, self.parts.rules("encoder_inputs"))
        return None

    def _has_other_length(self, port: Declared) -> bool:
        """Whether the last axis has another name than that of the tokens: the tokens of a source, not positions."""
        tokens = self.file.graph.inputs.get(self.ids or "")
        ends = [shape[-1] for shape in (port.shape, tokens.shape if tokens is not None else None) if shape]
        return len(ends) == 2 and all(isinstance(end, str) for end in ends) and ends[0] != ends[1]

    def _unknown_input(self, port: Declared) -> Port:
        cache_like, outputs = looks_like_cache(port.name, port.shape), self.file.graph.outputs.values()
        may_be_past = cache_like or port.shape is None or (port.dtype in FLOATS and any(map(port.like, outputs)))
        if port.name in self._unread and not may_be_past:
            return plain_port(port, "unused")
        if port.dtype and cache_like:
            reason = f"this input of {self.file.name} looks like a cache, but no rule says what to feed it"
            self.missing.append(MissingPart(port.name, reason))
        self.unknown.add(port.name)
        return plain_port(port, "auxiliary")

    @cached_property
    def _unread(self) -> frozenset[str]:
        """Inputs that no node reads but to return them as they are; empty where an exporter leaves fewer."""
        flows = [flow.flow for flow in (self.file.dataflow, self.file.first_dataflow) if flow is not None]
        names = frozenset(n for n in self.file.graph.inputs if flows and not any(_is_read(flow, n) for flow in flows))
        return names if len(names) <= MOST_UNREAD else frozenset()

    @cached_property
    def _cross_sites(self) -> set[int]:
        """The attentions over encoder states in the first step."""
        flow, found = self.file.first_dataflow, set[int]()
        if flow is None or self.flow is None:
            return found
        for slot in self.slots:
            if slot.kind != "cross-attention" or slot.used_as not in ("key", None):
                continue
            for name in (slot.past, slot.filled_by):
                fed = name if name in self.file.graph.inputs else None
                made = name if name in flow.flow.results else None
                use = flow.uses.use_of_output(made) if made else flow.uses.use_of(fed) if fed else None
                if use is not None and use.part in ("key", "key-value"):
                    found |= self.flow.softmax_after(use.site)
        return found

    def _by_codebook(self, port: Port) -> Port:
        """Token ids of an audio decoder have a row per codebook and sequence: MusicGen names its axis so."""
        batch = str(port.shape[0]) if port.role == "token_ids" and port.shape else ""
        if "codebooks" not in batch or port.axes[0] != "batch":
            return port
        if self.parts.codebooks is None:
            self.missing.append(MissingPart(port.name, "no config gives the number of codebooks"))
        return replace(port, axes=("batch_codebooks", *port.axes[1:]))

    def _with_position_rows(self, port: Port) -> Port:
        """Positions of rank 3 have a row for time, height and width each, where the graph leaves their number open."""
        rows = port.role == "position_ids" and len(port.axes) == POSITION_RANK and port.axes[0] == "fixed"
        if not rows or not port.shape or isinstance(port.shape[0], int):
            return port
        return replace(port, shape=(count_position_rows(self.parts.config), *port.shape[1:]))

    def _add_setting(self, port: Port) -> Port:
        """Add the value of a configuration that is fed. The only one known so far is an attention window."""
        value = decoder_config(self.parts.config).get("sliding_window")
        if is_count(value):
            return replace(port, value=value)
        reason = "its value is `sliding_window` of config.json, which is missing or no number"
        self.missing.append(MissingPart(port.name, reason))
        return port

    def _read_output(self, port: Declared, presents: set[str | None]) -> Port:
        if port.name in presents or (port.name.startswith("present") and not _is_count(port)):
            return plain_port(port, "present")
        by_name = self.parts.known.find_logits(port) or match_rule(port, self.parts.rules("outputs"))
        found = by_name or plain_port(port, "auxiliary")
        sizes = zip(found.shape or (), found.axes, strict=False)
        return replace(found, shape=tuple(as_number(*size) for size in sizes)) if found.axes else found


def _is_count(port: Declared) -> bool:
    """Whether a port holds a number, such as the length that a loop feeds next: present_length, int64[1]."""
    return "int" in port.dtype and port.shape is not None and len(port.shape) < 2


@dataclass(eq=False, repr=False)
class EncoderPorts:
    """Reads the ports of an encoder: inputs by name or type, outputs by the slots that they fill."""

    parts: StackParts
    file: OnnxFile
    missing: list[MissingPart] = field(default_factory=list, init=False)

    def read(self, slots: tuple[Slot, ...]) -> Graph:
        """Read all inputs and outputs."""
        view, rules = self.file.graph, self.parts.rules("encoder_inputs")
        ports = [convert_sizes(match_rule(port, rules) or self._unnamed_input(port)) for port in view.inputs.values()]
        filled = {slot.filled_by for slot in slots if slot.filled_in == "encode"}
        outputs = [
            plain_port(p, "present")
            if p.name in filled
            else match_rule(p, ENCODER_OUTPUTS) or plain_port(p, "auxiliary")
            for p in view.outputs.values()
        ]
        has_states = any(port.role == "encoder_states" for port in outputs)
        if not filled and not has_states and outputs and len(outputs[0].shape or ()) == 3:
            outputs[0] = replace(outputs[0], role="encoder_states", axes=("batch", "encoder", "hidden"))
        return Graph(self.file.name, tuple(self._add_image_size(port) for port in ports), tuple(outputs))

    def _unnamed_input(self, port: Declared) -> Port:
        """An input without a known name: tokens or features by its element type and rank."""
        rank, flow = len(port.shape or ()), self.file.dataflow
        if rank == 2 and port.dtype in INTEGERS and flow is not None:
            is_ids = bool(InputFlow(flow, self.file.graph.inputs).find_token_ids([port.name]))
            return Port(
                port.name, port.dtype, port.shape, "encoder_input" if is_ids else "encoder_mask", FEATURE_AXES[2]
            )
        if rank in FEATURE_AXES and port.dtype.startswith("float"):
            return Port(port.name, port.dtype, port.shape, "encoder_input", FEATURE_AXES[rank])
        self.missing.append(MissingPart(port.name, f"this input of {self.file.name} has no known role"))
        return plain_port(port, "auxiliary")

    def _add_image_size(self, port: Port) -> Port:
        """An image has the channels and the size that the config gives; names of axes do not tell."""
        if len(port.axes) != 4 or port.shape is None or len(port.shape) != 4:
            return port
        nested = self.parts.config.get("encoder")
        config = nested if isinstance(nested, dict) else self.parts.config
        channels, size = config.get("num_channels"), config.get("image_size")
        height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
        pixels = (n if is_count(n) else IMAGE_SIZE for n in (height, width))
        known = (None, channels if is_count(channels) else IMAGE_CHANNELS, *pixels)
        shape = tuple(d if isinstance(d, int) else k or d for d, k in zip(port.shape, known, strict=True))
        return replace(port, shape=shape)


def hold_encoder_states(decode: Graph, first: Graph | None) -> tuple[Graph, tuple[Slot, ...]]:
    """Make encoder states that the first graph returns and later steps take a slot, held like cross-attention.

    Returns the decode graph, with the input as a past where there is such a slot, and the slots.
    """
    taken = decode.port("encoder_states")
    if first is None or taken is None or first.port("encoder_states") is not None or taken.shape is None:
        return decode, ()
    declared = ((port.name, Declared(port.name, port.dtype, port.shape)) for port in first.outputs)
    given = next((name for name, port in declared if match_rule(port, ENCODER_OUTPUTS)), None)
    if given is None:
        return decode, ()
    slot = Slot(
        kind="encoder-states",
        layer=None,
        part="state",
        dtype=taken.dtype,
        shape=taken.shape,
        axes=("batch", "encoder", "hidden"),
        past=taken.name,
        present=None,
        filled_by=given,
        carry="hold",
        growth="constant",
        first="prefill",
    )
    ports = tuple(replace(port, role="past") if port is taken else port for port in decode.inputs)
    return replace(decode, inputs=ports), (slot,)


def _mark_logits(ports: list[Port], vocabulary: int | None, recurrent: bool) -> list[Port]:
    """Where no output is named so, the one that is no present holds the logits.

    Of several it is the one as wide as the embedding table has rows: some graphs return attention weights and hidden
    states too. Logits of the last token alone have two axes, float[batch, vocabulary]. A `recurrent` graph, without any
    attention cache, may also be the prediction network of a transducer: what it returns is as wide as its states.
    """
    if any(port.role in ("logits", "next_token") for port in ports):
        return ports
    free = [p for p in ports if p.role == "auxiliary" and p.shape and p.dtype.startswith(("float", "bfloat"))]
    if vocabulary is not None:  # the outputs of a first stage are no logits
        free = [p for p in free if HIDDEN_LIKE.fullmatch(p.name) is None or (p.shape or ())[-1] == vocabulary]
    wide = [p for p in free if len(p.shape or ()) == LOGITS_RANK]
    if len(wide) != 1:
        last = [p for p in free if len(p.shape or ()) in (2, LOGITS_RANK)]
        wide = last if len(last) == 1 else [p for p in last if p.shape and p.shape[-1] == vocabulary]
    if recurrent and vocabulary is not None:
        wide = [p for p in wide if p.shape and (p.shape[-1] == vocabulary or not isinstance(p.shape[-1], int))]
    found = wide[0] if len(wide) == 1 else _choose_logits(ports, free, vocabulary)
    letters = {1: "B", 2: "BV", 3: "BQV"}.get(len(found.shape or ()), "BQ1V") if found is not None else ""
    if found is not None and found.dtype in INTEGERS:
        letters = "B" if len(letters) == 1 else "BQ"
    return [replace(p, role="logits", axes=parse_axes(letters)) if p is found else p for p in ports]


def _choose_logits(ports: list[Port], floats: list[Port], vocabulary: int | None) -> Port | None:
    """The output that is compared where several may be: one as wide as the vocabulary, else token ids, else the widest.

    A graph that chooses its tokens returns integers; of several heads the first one stands for all.
    """
    tokens = [p for p in ports if p.role == "auxiliary" and p.dtype in INTEGERS and len(p.shape or ()) in (1, 2)]
    tokens = [p for p in tokens if p.shape != (1,)]  # one number is a count
    fitting = [p for p in floats if p.shape and p.shape[-1] == vocabulary and len(p.shape) in (2, 3, 4)]
    if not fitting and not tokens and len({len(p.shape or ()) for p in floats}) == 1:
        fitting = [p for p in floats if len(p.shape or ()) in (3, 4) and not isinstance((p.shape or (0,))[-1], int)]
    if vocabulary is None or fitting:
        return next(iter(fitting), None)
    return tokens[0] if len(tokens) == 1 else None
