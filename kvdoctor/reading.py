"""Reads the cache contract of a stack out of its graphs.

Names are hints; what branches return is asked of the graph.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvdoctor.contract import Axis, CacheContract, Dim, Graph, Lack, Phase, Port, Role, Slot
from kvdoctor.dialects import Dialect, RoleRule, SlotRule
from kvdoctor.dialects.optimum import OPTIMUM
from kvdoctor.graph import Declared, GraphView
from kvdoctor.model_folder import OnnxFile, StackFiles
from kvdoctor.trace import Run

DYNAMIC_QUANTISATION = {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention"}
CONTEXT_KEYS = (
    "max_target_positions",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_decoder_position_embeddings",
)
MOST_COUNTED = 2**31 - 1


def read_contract(stack: StackFiles, config: dict[str, Any], dialect: Dialect = OPTIMUM) -> CacheContract:
    """Read how to drive a stack. What cannot be understood is listed in `missing`."""
    return _Reader(stack, config, dialect).read()


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


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the decoder: nested for vision and speech encoder-decoders."""
    for key in ("decoder", "text_config"):
        if isinstance(config.get(key), dict):
            return dict(config[key])
    return config


def context_limit(config: dict[str, Any]) -> int | None:
    """Tokens that the config declares usable. T5 has relative positions and declares none."""
    part = decoder_config(config)
    return next((part[key] for key in CONTEXT_KEYS if is_count(part.get(key))), None)


def is_count(value: object) -> bool:
    """Whether a value from a config can be a number of tokens or words: configs hold anything."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 < value <= MOST_COUNTED


@dataclass
class _Reader:
    stack: StackFiles
    config: dict[str, Any]
    dialect: Dialect
    missing: list[Lack] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)

    def read(self) -> CacheContract:
        files = self.stack.files
        last, first = self.stack.main, files.get("decoder", self.stack.main)
        graphs = {"decoder": self._decoder_graph(last)}
        if first is not last:
            graphs["first-step"] = self._decoder_graph(first)
        phases = self._phases(graphs)
        if "encoder" in files and any(g.port("encoder_states") for g in graphs.values()):
            graphs["encoder"] = self._encoder_graph(files["encoder"])
            phases["encode"] = Phase("encoder")
        slots = tuple(self._slots(graphs["decoder"], graphs[phases["prefill"].graph], last))
        self._require(graphs, slots)
        return CacheContract(
            layout=self._layout(slots),
            graphs=graphs,
            phases=phases,
            slots=slots,
            first_step=self._first_step(),
            exactness=self._exactness(slots),
            vocabulary=self._vocabulary(graphs["decoder"]),
            context_limit=context_limit(self.config),
            evidence=tuple(self.evidence),
            missing=tuple(dict.fromkeys(self.missing)),
        )

    def _layout(self, slots: tuple[Slot, ...]) -> str:
        if not slots:
            return "unknown"
        kind = self.stack.kind
        if kind == "merged" and not any(slot.kind == "cross-attention" for slot in slots):
            return "optimum-merged-self-only"
        return "unknown" if kind == "unpaired" else f"optimum-{kind}"

    def _first_step(self) -> Any:
        return {"merged": "no-past-branch", "pair": "no-past-graph"}.get(self.stack.kind, "empty-past")

    def _phases(self, graphs: dict[str, Graph]) -> dict[str, Phase]:
        if self.stack.kind == "merged":
            switch = (self._view(self.stack.main).branches or ("",))[0]
            self.evidence.append(f"an If decided by {switch!r} holds the cached and the no-past branch")
            return {"prefill": Phase("decoder", False), "decode": Phase("decoder", True)}
        if "first-step" in graphs:
            self.evidence.append("a graph without past makes the cache that a second graph takes")
            return {"prefill": Phase("first-step"), "decode": Phase("decoder")}
        self.evidence.append("one graph takes a past of any length")
        return {"prefill": Phase("decoder"), "decode": Phase("decoder")}

    def _decoder_graph(self, file: OnnxFile) -> Graph:
        view = self._view(file)
        switch = view.branches[0] if view.branches else None
        inputs = [self._input(port, switch, file) for port in view.inputs.values()]
        presents = {self._present_name(match, rule) for match, rule in self._matches(view.inputs)}
        outputs = [self._output(port, presents) for port in view.outputs.values()]
        return Graph(file.name, tuple(inputs), tuple(outputs))

    def _encoder_graph(self, file: OnnxFile) -> Graph:
        view = self._view(file)
        inputs = [
            _ruled(port, self.dialect.encoder_inputs) or _port(port, "auxiliary") for port in view.inputs.values()
        ]
        for port in inputs:
            if port.role == "auxiliary":
                self.missing.append(Lack(port.name, f"this input of {file.name} plays no known part"))
        inputs = [self._image_sized(port) for port in inputs]
        outputs = [_ruled(p, self.dialect.encoder_outputs) or _port(p, "auxiliary") for p in view.outputs.values()]
        return Graph(file.name, tuple(inputs), tuple(outputs))

    def _image_sized(self, port: Port) -> Port:
        """An image has the channels and the size that the config says; names of axes do not tell."""
        if len(port.axes) != 4 or port.shape is None or len(port.shape) != 4:
            return port
        part = self.config.get("encoder")
        part = part if isinstance(part, dict) else self.config
        channels, size = part.get("num_channels"), part.get("image_size")
        height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
        known = (None, channels if is_count(channels) else 3, *(n if is_count(n) else 224 for n in (height, width)))
        shape = tuple(d if isinstance(d, int) else k or d for d, k in zip(port.shape, known, strict=True))
        return replace(port, shape=shape)

    def _input(self, port: Declared, switch: str | None, file: OnnxFile) -> Port:
        if port.name == switch:
            return _port(port, "branch_switch", _unnamed(port))
        for rule in self.dialect.slots:
            if rule.past.fullmatch(port.name):
                return _port(port, "past", rule.axes)
        ruled = _ruled(port, self.dialect.inputs)
        if ruled is None:
            kind = "looks like a cache" if self.dialect.looks_like_cache.match(port.name) else "plays no known part"
            self.missing.append(Lack(port.name, f"this input of {file.name} {kind}, and no rule says what to feed it"))
            return _port(port, "auxiliary")
        if ruled.shape is None or len(ruled.shape) != len(ruled.axes):
            # logits_to_keep is a scalar in some exports and a vector in others; the rest has a fixed rank.
            if ruled.role != "logits_to_keep":
                self.missing.append(Lack(port.name, f"this input of {file.name} has not the rank its name stands for"))
            return _port(port, ruled.role, _unnamed(port))
        return ruled

    def _output(self, port: Declared, presents: set[str]) -> Port:
        if port.name in presents or port.name.startswith("present"):
            return _port(port, "present")
        return _ruled(port, self.dialect.outputs) or _port(port, "auxiliary")

    def _matches(self, ports: dict[str, Declared]) -> Iterator[tuple[Any, SlotRule]]:
        for name in ports:
            for rule in self.dialect.slots:
                if match := rule.past.fullmatch(name):
                    yield match, rule

    def _present_name(self, match: Any, rule: SlotRule) -> str:
        return rule.present.format(**match.groupdict())

    def _slots(self, decode: Graph, prefill: Graph, file: OnnxFile) -> Iterator[Slot]:
        view = self._view(file)
        made, returned = {p.name for p in prefill.outputs}, {p.name for p in decode.outputs}
        found = sorted(self._matches(view.inputs), key=_slot_order)
        for match, rule in found:
            present, port = self._present_name(match, rule), view.inputs[match.string]
            if port.shape is None or len(port.shape) != len(rule.axes):
                self.missing.append(Lack(port.name, f"this input has no declared shape with {len(rule.axes)} axes"))
                continue
            yield Slot(
                kind=rule.kind,
                layer=int(match["layer"]),
                part=match["part"],
                dtype=port.dtype,
                shape=port.shape,
                axes=rule.axes,
                past=port.name,
                present=present if present in returned else None,
                filled_by=present if present in made else None,
                carry="hold" if rule.kind == "cross-attention" else "feed-back",
                emptied=view.emptied(present) is not None,
            )

    def _require(self, graphs: dict[str, Graph], slots: tuple[Slot, ...]) -> None:
        """Say what stands in the way of driving the stack."""
        decode = graphs["decoder"]
        if not slots:
            self.missing.append(Lack(decode.file, "no past input is named as a known exporter names it"))
        for role in ("token_ids", "logits"):
            if decode.port(role) is None:
                self.missing.append(Lack(decode.file, f"there is no {role}"))
        for slot in slots:
            symbolic = [a for d, a in zip(slot.shape, slot.axes, strict=True) if not isinstance(d, int)]
            if unknown := {"kv_heads", "head_dim"} & set(symbolic):
                self.missing.append(Lack(slot.past, f"its {' and '.join(sorted(unknown))} is no number"))

    def _exactness(self, slots: tuple[Slot, ...]) -> Any:
        operators: set[str] = set()
        for role, file in self.stack.files.items():
            if role != "encoder":
                operators |= set(self._view(file).operators)
        if operators & DYNAMIC_QUANTISATION:
            return "dynamic-quantisation"
        kinds = {slot.dtype for slot in slots} | {p.dtype for p in self._view(self.stack.main).outputs.values()}
        kinds |= {_weight_type(self._view(self.stack.main))}
        return next((kind for kind in ("bfloat16", "float16") if kind in kinds), "float")

    def _vocabulary(self, graph: Graph) -> int | None:
        logits = graph.port("logits")
        if logits and logits.shape and isinstance(logits.shape[-1], int) and is_count(logits.shape[-1]):
            return logits.shape[-1]
        size: Any = decoder_config(self.config).get("vocab_size")
        return size if is_count(size) else None

    @staticmethod
    def _view(file: OnnxFile) -> GraphView:
        assert file.view is not None  # noqa: S101 - stacks hold files that were read
        return file.view


def _slot_order(item: tuple[Any, SlotRule]) -> tuple[int, bool, str]:
    """By layer, self-attention first, key before value."""
    match, rule = item
    return int(match["layer"]), rule.kind != "self-attention", match["part"]


def _weight_type(view: GraphView) -> str:
    """The element type that most weights are stored in: a float16 graph may keep float inputs and outputs."""
    from kvdoctor.graph import ELEMENT_TYPES

    sizes: dict[str, int] = {}
    for tensor in view.model.graph.initializer:
        kind = ELEMENT_TYPES.get(tensor.data_type, "")
        sizes[kind] = sizes.get(kind, 0) + math.prod(tensor.dims)
    return max(sizes, key=lambda kind: sizes[kind], default="")


def _ruled(port: Declared, rules: tuple[RoleRule, ...]) -> Port | None:
    for rule in rules:
        if rule.name.fullmatch(port.name):
            return _port(port, rule.role, rule.axes)
    return None


def _unnamed(port: Declared) -> tuple[Axis, ...]:
    """Axes of a port of which only the number is known."""
    return tuple("fixed" for _ in port.shape or ())


def _port(port: Declared, role: Role, axes: tuple[Axis, ...] = ()) -> Port:
    """A port whose axes are the rule's as long as the ranks agree."""
    shape: tuple[Dim, ...] | None = port.shape
    return Port(port.name, port.dtype, shape, role, axes)
