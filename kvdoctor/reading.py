"""Reads the cache contract of a stack out of its graphs, its side-car configs and the names of its producer."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvdoctor.axes import as_number
from kvdoctor.configs import Configured, configured, context_limit, decoder_config, is_count
from kvdoctor.contract import CacheContract, Graph, Lack, Phase, Port, Slot
from kvdoctor.dialects import CACHE_LIKE, Dialect, axes, inputs, spoken
from kvdoctor.encoder_reading import EncoderReader
from kvdoctor.exactness import exactness_of
from kvdoctor.first_filling import shared_pasts
from kvdoctor.graph import Declared, GraphView
from kvdoctor.lacks import in_all
from kvdoctor.model_folder import SideCars
from kvdoctor.roles import FEW_ROWS, Looks, hidden_states, named, plain_port, ruled, with_numbers
from kvdoctor.slots import SlotReader
from kvdoctor.stacks import FLOATS, OnnxFile, StackFiles
from kvdoctor.trace import Run

RANK_WITH_TOKENS = 3
"""Of logits float[batch, new, vocabulary]; some graphs give those of the last token alone, float[batch, vocabulary]."""

MOST_UNREAD = 8
"""Inputs that nothing reads: an exporter leaves a few; a graph full of them is none that anybody would drive."""

MOST_CODEBOOKS = 64
"""Twice those of EnCodec, which has the most of the codecs that decoders of sound are written for."""


def read_contract(stack: StackFiles, side_cars: SideCars) -> CacheContract:
    """Read how to drive a stack. What cannot be understood is listed in `missing`."""
    return _Reader(stack, side_cars, configured(side_cars.config, side_cars.genai)).read()


def with_observed(contract: CacheContract, runs: tuple[Run, ...]) -> CacheContract:
    """The contract with what only runs can tell: a held slot that the prefill fills and a decode step empties."""
    plain = next((run for run in runs if run.experiment == "plain-loop"), None)
    emptied = {
        name
        for step in (plain.steps if plain else ())
        if step.phase == "decode" and step.step == 1
        for name in step.empty
    }
    slots = tuple(
        replace(slot, emptied=slot.emptied or (slot.carry == "hold" and slot.present in emptied))
        for slot in contract.slots
    )
    return replace(contract, slots=slots)


@dataclass
class _Reader:
    stack: StackFiles
    side_cars: SideCars
    known: Configured
    missing: list[Lack] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    hidden: str | None = None
    words: int | None = None
    unread: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decode = self.stack.main
        first = self.stack.files.get("decoder", self.decode)
        self.first = first if self.stack.kind == "pair" else self.decode
        self.encoder = self.stack.files.get("encoder")
        self.dialect: Dialect | None = spoken(self.decode.graph.inputs)
        self.encoder_reader = EncoderReader(self.dialect, self.side_cars.config, self.missing)

    def read(self) -> CacheContract:
        ids = {
            file.name: self._token_ids(file)
            for file in {self.decode.name: self.decode, self.first.name: self.first}.values()
        }
        reader = SlotReader(
            decode=self.decode,
            first=self.first,
            encoder=self.encoder,
            dialect=self.dialect,
            templates=tuple(self.known.slots(self.decode.graph.inputs)),
            claimed=self._claimed(ids[self.decode.name]),
            ids={name} if (name := ids[self.first.name]) else set(),
            tokens=self._tokens(ids[self.decode.name]),
            numbers=self.known.numbers,
        )
        slots = reader.read()
        self.missing += [*self._flaws(), *reader.missing]
        self.evidence += reader.evidence
        graphs = {"decoder": self._decoder_graph(self.decode, slots, ids[self.decode.name])}
        if self.first is not self.decode:
            graphs["first-step"] = self._decoder_graph(self.first, slots, ids[self.first.name])
        phases = self._phases(graphs)
        slots = (*slots, *self._encoder_state_slots(graphs))
        if self.encoder is not None and self._needs_encoder(graphs, slots):
            graphs["encoder"] = self.encoder_reader.graph(self.encoder, slots)
            phases["encode"] = Phase("encoder")
        contract = CacheContract(
            layout=self._layout(slots),
            graphs=graphs,
            phases=phases,
            slots=slots,
            first_step=self._first_step(),
            exactness=exactness_of(self._decoding(), slots),
            vocabulary=self._vocabulary(graphs["decoder"]),
            context_limit=context_limit(self.side_cars.config, self.side_cars.genai),
            heads=self.known.numbers.get("heads"),
            codebooks=self._codebooks() or 1 if _has_axis(graphs, "batch_codebooks") else 1,
            evidence=tuple(dict.fromkeys(self.evidence)),
            contradictions=(*reader.contradictions, *self._exchanged()),
        )
        return replace(contract, missing=in_all(contract, self.missing))

    def _flaws(self) -> Iterator[Lack]:
        """What no runtime can compute, or what cannot be followed here, in the graphs of the first step and of all."""
        for file, flow in ((self.decode, self.decode.dataflow), (self.first, self.first.first_dataflow)):
            if flow is None:
                yield Lack(file.name, "its functions, written out in place of their calls, are too many or too deep")
                continue
            if flow.effort.gave_up:
                yield Lack(file.name, "its inputs lead to too many nodes to be followed one by one")
            yield from (Lack(name, reason) for name, reason in flow.flow.flaws.items())

    def _token_ids(self, file: OnnxFile) -> str | None:
        """The input that carries tokens: by its name, else by the table it is looked up in."""
        view = file.graph
        rules = (*(self.dialect.inputs if self.dialect else ()), *inputs.INPUTS)
        known = [(name, named(port, rules)) for name, port in view.inputs.items()]
        tokens = [name for name, role in known if role in ("token_ids", "token_and_position")]
        if tokens or any(role == "embeddings" for _, role in known):
            return tokens[0] if tokens else None
        dataflow = file.first_dataflow
        if dataflow is None:
            return None
        free = [name for name, role in known if role is None]
        looks = Looks(dataflow, view.inputs, _logits_widths(view))
        found = looks.token_ids(free)
        if len(found) == 1 and looks.words(found[0]) not in looks.widths and hidden_states(view, dataflow):
            return None  # beside embeddings, integers that look up another table than the words are positions
        if len(found) > 1:
            both = " and ".join(map(repr, found[:3]))
            self.missing.append(Lack(found[1], f"{both} look up tables alike, and nothing says which holds the words"))
        return found[0] if len(found) == 1 else None

    def _exchanged(self) -> Iterator[Lack]:
        """Token ids and positions that bear each other's names, by the tables that they look up."""
        view, flow = self.decode.graph, self.decode.first_dataflow
        roles = {named(port, inputs.INPUTS): name for name, port in view.inputs.items()}
        ids, places = roles.get("token_ids"), roles.get("position_ids") or roles.get("cache_position")
        if flow is None or ids is None or places is None:
            return
        looks = Looks(flow, view.inputs, _logits_widths(view))
        rows, others = looks.words(ids), looks.words(places)
        named_logits = "logits" in view.outputs
        if named_logits and rows is not None and others in looks.widths and rows > max(looks.widths) + FEW_ROWS:
            yield Lack(ids, f"it looks up a table of {rows} rows, and {places!r} that of the {others} words")

    def _tokens(self, ids: str | None) -> set[str]:
        """What carries the new tokens into a decode step: their ids, or their embeddings."""
        rules = (*(self.dialect.inputs if self.dialect else ()), *inputs.INPUTS)
        embedded = {name for name, port in self.decode.graph.inputs.items() if named(port, rules) == "embeddings"}
        if not ids and not embedded and self.first is self.decode and self.decode.dataflow is not None:
            self.hidden = hidden_states(self.decode.graph, self.decode.dataflow)
        return embedded | {name for name in (ids, self.hidden) if name is not None}

    def _claimed(self, ids: str | None) -> set[str]:
        """Inputs of the decode graph that a name gives another part than that of a slot."""
        view = self.decode.graph
        rules = (*(self.dialect.inputs if self.dialect else ()), *inputs.INPUTS)
        slots = {n.past for n in self.dialect.named(view.inputs)} if self.dialect else set()
        switch = {view.branches[0]} if view.branches else set()
        by_name = {name for name, port in view.inputs.items() if ruled(port, rules) is not None} - slots
        return by_name | switch | ({ids} if ids else set())

    def _layout(self, slots: tuple[Slot, ...]) -> str:
        if self.stack.operator is not None:
            return f"{self.stack.operator}-operator"
        if not slots:
            return "unknown"
        family = self.known.family or (self.dialect.name if self.dialect else self._anonymous())
        kind = {"decoder-only": "decoder-only", "unpaired": "unknown"}.get(self.stack.kind, self.stack.kind)
        if kind == "unknown":
            return "unknown"
        if kind == "merged" and not any(slot.kind == "cross-attention" for slot in slots):
            return f"{family}-merged-self-only"
        if kind == "decoder-only" and self.encoder is not None and any(s.filled_in == "encode" for s in slots):
            kind = "encoder-decoder"
        if any(slot.kind in ("conv-state", "recurrent-state") for slot in slots):
            kind += "-hybrid" if any(slot.kind == "self-attention" for slot in slots) else "-recurrent"
        if any(slot.growth in ("static", "delta", "ring", "paged") for slot in slots):
            kind += f"-{next(s.growth for s in slots if s.growth in ('static', 'delta', 'ring', 'paged'))}"
        return f"{family}-{kind}"

    def _anonymous(self) -> str:
        return "torch" if self.decode.graph.model.producer_name == "pytorch" else "unnamed"

    def _first_step(self) -> Any:
        return {"merged": "no-past-branch", "pair": "no-past-graph"}.get(self.stack.kind, "empty-past")

    def _phases(self, graphs: dict[str, Graph]) -> dict[str, Phase]:
        if self.stack.kind == "merged":
            switch, branches = self.decode.graph.branches or ("", None)
            on = branches.on if branches is not None else True
            self.evidence.append(f"an If decided by {switch!r} holds the cached and the no-past branch")
            return {"prefill": Phase("decoder", not on), "decode": Phase("decoder", on)}
        if "first-step" in graphs:
            self.evidence.append("a graph without past makes the cache that a second graph takes")
            return {"prefill": Phase("first-step"), "decode": Phase("decoder")}
        self.evidence.append("one graph serves the first step and all later ones")
        return {"prefill": Phase("decoder"), "decode": Phase("decoder")}

    def _decoder_graph(self, file: OnnxFile, slots: tuple[Slot, ...], ids: str | None) -> Graph:
        view = file.graph
        switch = view.branches[0] if view.branches else None
        shared = shared_pasts(self.decode.graph, view, {slot.past for slot in slots})
        pasts = {slot.past: slot for slot in slots if slot.past in shared}
        flow = file.first_dataflow
        looks = Looks(flow, view.inputs, _logits_widths(view), self.hidden) if flow is not None else None
        cross = self._cross_sites(file, slots, looks)
        ports = []
        for port in view.inputs.values():
            if port.name == switch:
                ports.append(plain_port(port, "branch_switch"))
            elif port.name == self.hidden:
                self.evidence.append(f"{port.name!r} are hidden states: keys and values are made of them, no token ids")
                ports.append(Port(port.name, port.dtype, port.shape, "embeddings", axes("BQD")))
            elif port.name in pasts:
                slot = pasts[port.name]
                ports.append(Port(port.name, port.dtype, slot.shape, "past", slot.axes))
            else:
                ports.append(self._encoders(port, file) or self._input(port, file, ids, looks, cross))
        # Each graph by its own names: where tensors are numbered, t59 of one has nothing to do with t59 of another.
        presents = {slot.present for slot in slots if file is self.decode}
        presents |= {slot.filled_by for slot in slots if file is self.first}
        outputs = [self._output(port, presents) for port in view.outputs.values()]
        ports = [self._by_codebook(with_numbers(port)) for port in ports]
        fed = any(port.role in ("token_ids", "token_and_position", "embeddings") for port in ports)
        words = looks.words(ids) if looks is not None and ids is not None else None
        self.words = min(filter(None, (self.words, words)), default=None)
        return Graph(file.name, tuple(ports), tuple(_with_logits(outputs, words) if fed else outputs))

    def _input(self, port: Declared, file: OnnxFile, ids: str | None, looks: Looks | None, cross: set[int]) -> Port:
        rules = (*(self.dialect.inputs if self.dialect else ()), *inputs.INPUTS)
        found = self.known.role(port) or ruled(port, rules)
        if port.name == ids and (found is None or not found.role.startswith("token")):
            rank = len(port.shape or ())
            found = Port(port.name, port.dtype, port.shape, "token_ids", axes("BQ" if rank == 2 else "Q" * rank))
        if found is not None and found.role == "setting":
            return self._setting(found)
        if found is not None and found.role == "attention_mask" and looks is not None and cross:
            sites = looks.mask_sites(port.name)
            if sites and sites <= cross:
                found = replace(found, role="encoder_mask", axes=("batch", "encoder"))
        if found is not None:
            return found
        if looks is not None and (not CACHE_LIKE.match(port.name) or _is_number(port)):
            looked = looks.role(port.name, cross)
            if looked is not None and not (looked[0] == "setting" and named(port, rules) is not None):
                self.evidence.append(f"{port.name!r} is {looked[0]} by what the graph does with it")
                # Kinds of tokens (segments, languages): all are of the first.
                value = 0.0 if looked[0] == "setting" else None
                return Port(port.name, port.dtype, port.shape, *looked, value=value)
        if file is self.first and file is not self.decode:
            encoder = ruled(port, self.encoder_reader.rules)
            if encoder is not None:
                return encoder
        return self._unknown(port, file, named(port, rules) is not None)

    def _is_unused(self, port: Declared, file: OnnxFile) -> bool:
        """Whether no node takes an input, in no branch; what might be a past that is ignored is not called so."""
        if port.shape is None or CACHE_LIKE.match(port.name) or port.name not in self._unread(file):
            return False
        return port.dtype not in FLOATS or not any(port.like(output) for output in file.graph.outputs.values())

    def _unread(self, file: OnnxFile) -> frozenset[str]:
        """Inputs that no node takes; none where there are too many for that to be an exporter's doing."""
        if file.name not in self.unread:
            flows = [flow.flow for flow in (file.dataflow, file.first_dataflow) if flow is not None]
            read = {name for flow in flows for name in (*flow.consumers, *flow.decides)}
            names = {name for name in file.graph.inputs if flows and name not in read}
            self.unread[file.name] = frozenset(names if len(names) <= MOST_UNREAD else ())
        return self.unread[file.name]

    def _encoders(self, port: Declared, file: OnnxFile) -> Port | None:
        """An input of the encoder, in a first step that holds it: the decoder's own inputs say whose the others are."""
        if file is not self.first or not inputs.WHOSE_WITHOUT_A_WORD.fullmatch(port.name):
            return None
        names = file.graph.inputs
        if "input_ids" not in names or not any(map(inputs.DECODERS_OWN.fullmatch, names)):
            return None
        return self.known.role(port) or ruled(port, self.encoder_reader.rules)

    def _by_codebook(self, port: Port) -> Port:
        """Tokens of a model of sound have a row for each codebook of each sequence; MusicGen's axis says so."""
        batch = str(port.shape[0]) if port.role == "token_ids" and port.shape else ""
        if "codebooks" not in batch or port.axes[0] != "batch":
            return port
        if self._codebooks() is None:
            self.missing.append(Lack(port.name, "no config says how many codebooks there are"))
        return replace(port, axes=("batch_codebooks", *port.axes[1:]))

    def _codebooks(self) -> int | None:
        count = decoder_config(self.side_cars.config).get("num_codebooks")
        return count if is_count(count) and count <= MOST_CODEBOOKS else None

    def _setting(self, port: Port) -> Port:
        """A part of the configuration that is fed: the one there is so far is the window of a layer's attention."""
        value = decoder_config(self.side_cars.config).get("sliding_window")
        if not is_count(value):
            self.missing.append(Lack(port.name, "its value is `sliding_window` of config.json, which is not there"))
            return port
        return replace(port, value=value)

    def _unknown(self, port: Declared, file: OnnxFile, is_named: bool) -> Port:
        if self._is_unused(port, file):
            return plain_port(port, "unused")
        if is_named:
            self.missing.append(Lack(port.name, f"this input of {file.name} has not the rank its name stands for"))
        else:
            kind = "looks like a cache" if CACHE_LIKE.match(port.name) else "plays no known part"
            self.missing.append(Lack(port.name, f"this input of {file.name} {kind}, and no rule says what to feed it"))
        return plain_port(port, "auxiliary")

    def _cross_sites(self, file: OnnxFile, slots: tuple[Slot, ...], looks: Looks | None) -> set[int]:
        """The attentions over encoder states in the first step of a graph."""
        flow = file.first_dataflow
        if flow is None or looks is None:
            return set()
        found: set[int] = set()
        for slot in slots:
            if slot.kind == "cross-attention" and slot.used_as in ("key", None):
                for name in (slot.past, slot.filled_by):
                    use = None
                    if name in flow.flow.results:
                        use = flow.uses.made(name)
                    elif name in file.graph.inputs:
                        use = flow.uses.of(name)
                    if use is not None and use.part in ("key", "key-value"):
                        found |= looks.softmax_behind(use.site)
        return found

    def _output(self, port: Declared, presents: set[str | None]) -> Port:
        if port.name in presents or port.name.startswith("present"):
            return plain_port(port, "present")
        rules = (*(self.dialect.outputs if self.dialect else ()), *inputs.OUTPUTS)
        found = self.known.output(port) or ruled(port, rules) or plain_port(port, "auxiliary")
        sizes = zip(found.shape or (), found.axes, strict=False)
        return replace(found, shape=tuple(as_number(*size) for size in sizes)) if found.axes else found

    def _encoder_state_slots(self, graphs: dict[str, Graph]) -> Iterator[Slot]:
        """Encoder states that the first graph returns and later steps take: held like a cross-attention cache."""
        decode, first = graphs["decoder"], graphs.get("first-step")
        taken = decode.port("encoder_states")
        if first is None or taken is None or first.port("encoder_states") is not None or taken.shape is None:
            return
        given = next((p for p in first.outputs if ruled(_as_declared(p), inputs.ENCODER_OUTPUTS)), None)
        if given is not None:
            ports = tuple(replace(p, role="past") if p is taken else p for p in decode.inputs)
            graphs["decoder"] = replace(decode, inputs=ports)
            yield Slot(
                "encoder-states",
                None,
                "state",
                taken.dtype,
                taken.shape,
                ("batch", "encoder", "hidden"),
                taken.name,
                None,
                given.name,
                "hold",
                growth="constant",
                first="prefill",
            )

    def _needs_encoder(self, graphs: dict[str, Graph], slots: tuple[Slot, ...]) -> bool:
        takes_states = any(graph.port("encoder_states") for graph in graphs.values())
        return takes_states or any(slot.filled_in == "encode" for slot in slots)

    def _decoding(self) -> Iterator[GraphView]:
        """The graphs that decode, the one that uses the cache first."""
        yield self.decode.graph
        yield from (f.graph for role, f in self.stack.files.items() if role != "encoder" and f is not self.decode)

    def _vocabulary(self, graph: Graph) -> int | None:
        logits = graph.port("logits")
        if logits and logits.shape and isinstance(logits.shape[-1], int) and is_count(logits.shape[-1]):
            # A head may be padded with words that the table has not.
            return min(logits.shape[-1], self.words or logits.shape[-1])
        size: Any = decoder_config(self.side_cars.config).get("vocab_size")
        return size if is_count(size) else None


def _is_number(port: Declared) -> bool:
    return port.dtype in ("int64", "int32") and port.shape in ((), (1,))


def _has_axis(graphs: dict[str, Graph], axis: str) -> bool:
    return any(axis in port.axes for graph in graphs.values() for port in graph.inputs)


def _as_declared(port: Port) -> Declared:
    return Declared(port.name, port.dtype, port.shape)


def _logits_widths(view: GraphView) -> frozenset[int]:
    """Widths of the outputs that may be logits."""
    named = view.outputs.get("logits")
    ports = [named] if named is not None else _wide(view)
    return frozenset(size for port in ports if port.shape and isinstance(size := port.shape[-1], int))


def _wide(view: GraphView) -> Iterator[Declared]:
    """Outputs that may be logits: float[batch, new, vocabulary]."""
    for port in view.outputs.values():
        if port.shape is not None and len(port.shape) == 3 and isinstance(port.shape[-1], int):
            yield port


def _with_logits(ports: list[Port], words: int | None) -> list[Port]:
    """Where no output is named so, the one that is no present holds the logits.

    Of several it is the one as wide as the table of words: attention weights and hidden states are returned as well.
    """
    if any(port.role in ("logits", "next_token") for port in ports):
        return ports
    free = [p for p in ports if p.role == "auxiliary" and p.shape and p.dtype.startswith(("float", "bfloat"))]
    wide = [p for p in free if len(p.shape or ()) == RANK_WITH_TOKENS]
    if len(wide) != 1:
        last = [p for p in free if len(p.shape or ()) in (2, RANK_WITH_TOKENS)]
        wide = last if len(last) == 1 else [p for p in last if p.shape and p.shape[-1] == words]
    if len(wide) != 1:
        return ports
    letters = "BQV" if len(wide[0].shape or ()) == RANK_WITH_TOKENS else "BV"
    return [replace(p, role="logits", axes=axes(letters)) if p is wide[0] else p for p in ports]
