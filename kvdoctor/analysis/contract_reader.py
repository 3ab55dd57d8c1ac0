"""Reads the cache contract of a stack from its graphs, its side-car configs and the exporter's names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kvdoctor.analysis.abstract_step import count_heads, order_tokens
from kvdoctor.analysis.axes import STATES
from kvdoctor.analysis.completeness import add_missing_parts, as_no_decoder
from kvdoctor.analysis.configs import SideCars, context_limit, decoder_config, is_count
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.embedding_graphs import find_embedded_input, read_embedding_graph
from kvdoctor.analysis.feature_encoders import ROLES, find_output, read_feature_encoder
from kvdoctor.analysis.port_roles import INTEGERS, TokenInputs, find_swapped_inputs, find_token_inputs, match_rule
from kvdoctor.analysis.ports import DecoderPorts, EncoderPorts, hold_encoder_states
from kvdoctor.analysis.readings import MASKS, find_readings
from kvdoctor.analysis.slot_init import give_cross_caches
from kvdoctor.analysis.slots import SlotReader
from kvdoctor.analysis.stacks import INPUT_ROLES, StackFiles, StackParts
from kvdoctor.analysis.thresholds import find_ring
from kvdoctor.contract import CacheContract, Features, Graph, MissingPart, Phase, Slot
from kvdoctor.decode.runs import Run
from kvdoctor.model.precision import exactness_of

FIXED_GROWTHS = ("static", "delta", "ring", "paged")
"""Growths that a layout's name ends with."""


def read_contract(stack: StackFiles, side_cars: SideCars) -> CacheContract:
    """Read how to drive a stack. What cannot be determined is listed in `missing`."""
    return _Reader(stack, side_cars, StackParts.of(stack, side_cars.config, side_cars.genai)).read()


def add_observed_sizes(contract: CacheContract, runs: tuple[Run, ...]) -> CacheContract:
    """Add what only runs show: which held slots, filled by the prefill, a decode step returns empty."""
    plain = next((run for run in runs if run.experiment == "plain-loop"), None)
    steps = plain.steps if plain is not None else ()
    emptied = {name for step in steps if step.phase == "decode" and step.step == 1 for name in step.empty}
    slots = tuple(
        replace(slot, emptied=slot.emptied or (slot.carry == "hold" and slot.present in emptied))
        for slot in contract.slots
    )
    return replace(contract, slots=slots)


def _find_masked_states(contract: CacheContract, dataflow: Dataflow | None) -> CacheContract:
    """The contract with whether a mask reaches what a decode step writes to each state."""
    if dataflow is None or not any(slot.kind in STATES for slot in contract.slots):
        return contract
    masked = dataflow.uses.masked_by(port.name for port in contract.graph("decode").inputs if port.role in MASKS)
    reached = {output for output, value in dataflow.flow.results.items() if value in masked}
    slots = (replace(one, takes_mask=one.present in reached) if one.kind in STATES else one for one in contract.slots)
    return replace(contract, slots=tuple(slots))


@dataclass(eq=False, repr=False)
class _Reader:
    """Reads one stack. `missing` and `evidence` grow while it reads."""

    stack: StackFiles
    side_cars: SideCars
    parts: StackParts
    missing: list[MissingPart] = field(default_factory=list, init=False)
    evidence: list[str] = field(default_factory=list, init=False)
    vocabularies: list[int] = field(default_factory=list, init=False)
    unknown: set[str] = field(default_factory=set, init=False)
    guessed: set[str] = field(default_factory=set, init=False)

    def read(self) -> CacheContract:
        parts = self.parts
        tokens = find_token_inputs(parts)
        ids = tokens.ids[parts.first.name]
        found = SlotReader(parts, self._claimed(tokens), {ids} if ids else set(), tokens.names)
        slots = found.read()
        if self.stack.kind == "decoder-only" and parts.encoder is None:
            slots = give_cross_caches(slots) if tokens.names else slots
            if any(slot.filled_in == "encode" for slot in slots):
                self.evidence.append("no file makes the cross-attention cache: the caller's encoder gives it")
        self.missing += [*self._find_flaws(), *found.missing]
        self.evidence += found.evidence
        graphs = self._read_decoders(slots, tokens)
        graphs["decoder"] = replace(graphs["decoder"], stages=self.stack.stages)
        phases = self._phases(graphs)
        graphs["decoder"], states = hold_encoder_states(graphs["decoder"], graphs.get("first-step"))
        slots = (*slots, *states)
        takes_states = any(graph.port("encoder_states") for graph in graphs.values())
        if parts.encoder is not None and (takes_states or any(slot.filled_in == "encode" for slot in slots)):
            encoder = EncoderPorts(parts, parts.encoder)
            graphs["encoder"], phases["encode"] = encoder.read(slots), Phase("encoder")
            self.missing += encoder.missing
        if (embedding := self._read_embedding(graphs)) is not None:
            graphs["embedding"], phases["embed"] = embedding, Phase("embedding")
        features = self._read_features(graphs, phases)
        decoding = [file for role, file in self.stack.files.items() if role not in INPUT_ROLES]
        others = [file.graph for file in decoding if file is not parts.decode]
        contract = CacheContract(
            layout=self._layout(slots),
            graphs=graphs,
            phases=phases,
            slots=slots,
            first_step=self._first_step(),
            exactness=exactness_of((parts.decode.graph, *others), slots),
            vocabulary=self._vocabulary(graphs["decoder"]),
            context_limit=context_limit(self.side_cars.config, self.side_cars.genai),
            heads=parts.known.numbers.get("heads"),
            codebooks=self._count_codebooks(graphs),
            evidence=tuple(dict.fromkeys(self.evidence)),
            contradictions=(*found.contradictions, *find_swapped_inputs(parts.decode)),
            features=features,
        )
        contract, dataflow = order_tokens(contract, parts.decode), parts.decode.dataflow
        contract = replace(contract, ring=find_ring(dataflow.flow, contract) if dataflow is not None else None)
        if contract.no_decoder:
            return as_no_decoder(contract)
        views = {file.name: file.graph for file in (parts.decode, parts.first)}
        contract = _find_masked_states(find_readings(contract, views, self.unknown, self.guessed), dataflow)
        return add_missing_parts(count_heads(contract, parts.decode), self.missing)

    def _count_codebooks(self, graphs: Mapping[str, Graph]) -> int:
        """The tokens of a step: by an axis of the token ids, else by the config where they share one with the batch."""
        fed = [port for graph in graphs.values() for port in graph.inputs if port.role == "token_ids"]
        declared = next((size for port in fed if (size := port.size("codebooks"))), None)
        folded = any("batch_codebooks" in port.axes for port in fed)
        return declared or (folded and self.parts.codebooks) or 1

    def _find_flaws(self) -> Iterator[MissingPart]:
        """Parts of the graphs that no runtime can compute, or that are too large to be followed."""
        decode, first = self.parts.decode, self.parts.first
        for file, flow in ((decode, decode.dataflow), (first, first.first_dataflow)):
            if flow is None:
                yield MissingPart(file.name, "its local functions are too many or nested too deeply to be inlined")
                continue
            if flow.budget.is_spent:
                yield MissingPart(file.name, "its inputs reach too many nodes to be followed one by one")
            yield from (MissingPart(name, reason, contradicts=True) for name, reason in flow.flow.flaws.items())

    def _claimed(self, tokens: TokenInputs) -> set[str]:
        """Inputs of the decode graph that a name gives another role than that of a slot."""
        view, dialect = self.parts.decode.graph, self.parts.dialect
        slots = {name.past for name in dialect.find_slots(view.inputs)} if dialect else set()
        switch = {view.branches[0]} if view.branches else set()
        by_name = {
            name for name, port in view.inputs.items() if match_rule(port, self.parts.rules("inputs")) is not None
        }
        ids = tokens.ids[self.parts.decode.name]
        return (by_name - slots) | switch | ({ids} if ids else set())

    def _read_decoders(self, slots: tuple[Slot, ...], tokens: TokenInputs) -> dict[str, Graph]:
        """The graph of decode steps and, in a pair, that of the first step."""
        files = {"decoder": self.parts.decode}
        if self.parts.first is not self.parts.decode:
            files["first-step"] = self.parts.first
        graphs = {}
        for name, file in files.items():
            reader = DecoderPorts(self.parts, file, slots, tokens)
            graphs[name] = reader.read()
            self.missing += reader.missing
            self.evidence += reader.evidence
            self.unknown |= reader.unknown
            self.guessed |= reader.guessed
            self.vocabularies += [reader.vocabulary] if reader.vocabulary else []
        return graphs

    def _phases(self, graphs: dict[str, Graph]) -> dict[str, Phase]:
        if self.stack.kind == "merged":
            switch, branches = self.parts.decode.graph.branches or ("", None)
            on = branches.on if branches is not None else True
            self.evidence.append(f"one graph: its If on {switch!r} selects the cached or the no-past branch")
            return {"prefill": Phase("decoder", not on), "decode": Phase("decoder", on)}
        if "first-step" in graphs:
            self.evidence.append("two graphs: the first step has no past; its cache is the past of the second graph")
            return {"prefill": Phase("first-step"), "decode": Phase("decoder")}
        count = len(self.stack.stages)
        several = f"{count} stages, run one after the other, serve" if count else "one graph serves"
        self.evidence.append(f"{several} the first step and all later ones")
        return {"prefill": Phase("decoder"), "decode": Phase("decoder")}

    def _read_embedding(self, graphs: dict[str, Graph]) -> Graph | None:
        """The graph that makes the embeddings of the decoder's graphs, if a file of the stack does."""
        self.evidence += self.stack.remarks
        file = self.stack.files.get("embedding")
        decoders = [graph for name, graph in graphs.items() if name != "encoder"]
        graph = read_embedding_graph(file, decoders) if file is not None else None
        if graph is not None:
            made = " and ".join(repr(port.name) for port in graph.outputs if port.role == "embeddings")
            self.evidence.append(f"{graph.file} makes {made} of token ids: type and width are those of the decoder")
        return graph

    def _read_features(self, graphs: dict[str, Graph], phases: dict[str, Phase]) -> tuple[Features, ...]:
        """The encoders of images and audio: each is a graph and a phase of its own."""
        wanted = find_embedded_input(self.stack, self.side_cars.config, self.side_cars.genai)
        found = []
        for kind, role in ROLES.items():
            file = self.stack.files.get(role)
            if file is not None and wanted is not None and find_output(file, wanted) is not None:
                graphs[kind], rows = read_feature_encoder(file, kind, wanted, self.side_cars)
                phases[kind] = Phase(kind)
                found.append(rows)
                self.evidence.append(f"{file.name} makes {rows.output!r} as wide as the embeddings of tokens")
        return tuple(found)

    def _first_step(self) -> Literal["empty-past", "no-past-branch", "no-past-graph"]:
        if self.stack.kind == "merged":
            return "no-past-branch"
        return "no-past-graph" if self.stack.is_pair else "empty-past"

    def _layout(self, slots: tuple[Slot, ...]) -> str:
        if self.stack.operator is not None:
            return f"{self.stack.operator}-operator"
        if not slots or self.stack.kind == "unpaired":
            return "unknown"
        family, kind = self._family(), "pipeline" if self.stack.stages else str(self.stack.kind)
        if kind == "merged" and not any(slot.kind == "cross-attention" for slot in slots):
            return f"{family}-merged-self-only"
        if kind == "decoder-only" and self.parts.encoder and any(s.filled_in == "encode" for s in slots):
            kind = "encoder-decoder"
        if any(slot.kind in ("conv-state", "recurrent-state") for slot in slots):
            kind += "-hybrid" if any(slot.kind == "self-attention" for slot in slots) else "-recurrent"
        growth = next((slot.growth for slot in slots if slot.growth in FIXED_GROWTHS), None)
        return f"{family}-{kind}-{growth}" if growth else f"{family}-{kind}"

    def _family(self) -> str:
        """Who named the graph's tensors."""
        if self.parts.known.family is not None:
            return self.parts.known.family
        if self.parts.dialect is not None:
            return self.parts.dialect.name
        return "torch" if self.parts.decode.graph.model.producer_name == "pytorch" else "unnamed"

    def _vocabulary(self, graph: Graph) -> int | None:
        logits = graph.port("logits")
        shape = logits.shape if logits and logits.shape else ()
        # Convolutions in place of products leave float[batch, vocabulary, 1, 1].
        width = shape[1] if len(shape) == 4 and shape[2:] == (1, 1) else shape[-1] if shape else None
        if logits is not None and logits.dtype in INTEGERS:
            width = min(self.vocabularies, default=None)  # ids in place of logits are as wide as there are sequences
        size = width if is_count(width) else decoder_config(self.side_cars.config).get("vocab_size")
        # The output head may be padded to more rows than the embedding table has.
        return min([*([size] if is_count(size) else []), *self.vocabularies], default=None)
