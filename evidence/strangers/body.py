"""One graph or branch of a decoder: inputs, embedding, blocks of mixers, logits, and where a fault may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import inputs
from .cache import Cache, Kind, axes_of
from .design import NAMINGS, SINKS, Contract, Design, Port
from .mixers import ATTENTION, cross_kinds
from .recurrent import RECURRENT
from .sheet import FLOAT, INT, INT32, Sheet, Weights

if TYPE_CHECKING:
    from .faults import Fault

NEVER = -1e9
MIXERS = {**ATTENTION, **RECURRENT}


class Body(Sheet):
    """The nodes of a decoder; `cached` says whether this body has a past."""

    design: Design
    ids: str
    rows: str
    new: str
    at_point: str

    def __init__(
        self, design: Design, weights: Weights, fault: Fault | None = None, cached: bool = True, prefix: str = ""
    ) -> None:
        super().__init__(weights, prefix)
        self.design, self.fault, self.cached = design, fault, cached
        self.naming = NAMINGS[design.names]
        self.contract = Contract()
        self.points: dict[str, str] = {}
        self.layered: set[str] = set()
        self.slips: dict[str, tuple[str, ...]] = {}
        self.outputs: list[tuple[str, str, int]] = []
        self.record: dict[tuple[str, int], str] = {}
        self.at_point = ""
        self.layer = -1
        self.past = self.length = self.sink = ""
        self.entries = ("", "", "")
        self.cache = Cache(self)
        self._declare()
        self._read_ids()
        self.past, self.query_slots = inputs.counted(self)
        self.hidden = self._embedded()
        self.positions = self.at("positions", inputs.positions(self), "bs")
        self.mask = inputs.mask(self)
        self._decode()

    # Faults

    def at(self, point: str, value: str, axes: str, layer: int = -1) -> str:
        """A place where a fault may take the place of a value."""
        self.points.setdefault(point, axes)
        self.record[point, layer], self.at_point = value, point
        if layer > 0:
            self.layered.add(point)
        fault = self.fault
        if fault is None or fault.point != point or (layer >= 0 and fault.layer not in (-1, layer)):
            return value
        return fault.applied(self, value, axes, layer)

    def slip(self, name: str, *names: str, anywhere: bool = False) -> bool:
        """Whether the author of this graph made this mistake; `names` are the findings that are right for it."""
        self.slips[name] = names
        fault = self.fault
        return fault is not None and fault.point == name and (anywhere or fault.strikes_here(self))

    # Inputs

    def input(self, role: str, kind: int, *shape: str | int, name: str = "") -> str:
        """A new input, once for each role."""
        name = name or self.naming.port(role)
        if all(port.name != name for port in self.contract.ports):
            batch = 1 if self.design.batch_one else "batch"
            new = 1 if self.design.one_token else "new"
            sizes = tuple({"batch": batch, "new": new}.get(str(size), size) for size in shape)
            self.contract.ports.append(Port(name, role, kind, sizes))
        return name

    def _declare(self) -> None:
        for layer, mixer in enumerate(self.design.mixers):
            for kind in MIXERS[mixer].kinds(self.design, layer):
                self.cache.declare(kind, layer)
            for kind in cross_kinds(self.design):
                self.cache.declare(kind, layer)
        for kind in inputs.kept(self.design):
            self.cache.declare(kind, 0)
        if self.cached:
            self.contract.slots.extend(self.cache.slots())

    def _read_ids(self) -> None:
        """The input of tokens, and int64[1]: its rows and new tokens."""
        design = self.design
        if "embeds" in design.extras:
            self.ids = self.input("inputs_embeds", FLOAT, "batch", "new", design.width)
        elif "codebooks" in design.extras:
            self.ids = self.input("codes", INT, "batch", "new", 3)
        elif "time_major" in design.extras:
            self.ids = self.move(self.input("tokens_first", INT, "new", "batch"), 1, 0)
        elif "rank_one" in design.extras:
            self.ids = self.lift(self.input("tokens_flat", inputs.ids_kind(design), "new"), 0)
        else:
            self.ids = self.input("input_ids", inputs.ids_kind(design), "batch", "new")
        self.rows, self.new = self.size(self.ids, 0), self.size(self.ids, 1)
        if self.slip("rows traced as one", "batch-axis-frozen", "step-fails", "batch-rows-interact"):
            self.rows = self.weights.constant([1])

    def _embedded(self) -> str:
        """float[b, s, width]."""
        design = self.design
        table = self.weights.weight("embed", design.vocab, design.width, scale=1.0)
        if "embeds" in design.extras:
            hidden = self.at("tokens", self.ids, "bsd")
        elif "codebooks" in design.extras:
            hidden = self.sum(self.op("Gather", table, self.ids), 2, keep=False)
        else:
            hidden = self.op("Gather", table, self.at("tokens", self.ids, "bs"))
        for extra in design.extras:
            if change := inputs.EMBEDDED.get(extra):
                hidden = change(self, hidden)
        return hidden

    # Blocks

    def _decode(self) -> None:
        design, hidden = self.design, self.hidden
        if design.positions == "learned":
            table = self.weights.weight("wpe", 1024, design.width, scale=1.0)
            hidden = self.add(hidden, self.op("Gather", table, self.positions))
        for layer, mixer in enumerate(design.mixers):
            hidden = self._block(hidden, layer, mixer)
        hidden = self.norm(hidden, "norm", design.width, design.norm == "layer")
        self.hidden = self.at("hidden", hidden, "bsd")
        self._finish(self.hidden)

    def _block(self, hidden: str, layer: int, mixer: str) -> str:
        width, centred = self.design.width, self.design.norm == "layer"
        normed = self.norm(hidden, f"norm{layer}", width, centred)
        mixed = MIXERS[mixer].mix(self, normed, layer)
        if layer == 0 and self.design.files != "one" and self.slip("weights of a branch differ", "branches-disagree"):
            mixed = self.linear(mixed, "other_branch", width, width)
        hidden = self.add(hidden, mixed)
        if self.design.cross:
            hidden = self.add(hidden, MIXERS["cross"].mix(self, self.norm(hidden, f"normx{layer}", width), layer))
        if self.design.block != "parallel":
            normed = self.norm(hidden, f"norm_ffn{layer}", width, centred)
        return self.add(hidden, self._ffn(normed, layer))

    def _ffn(self, value: str, layer: int) -> str:
        width = self.design.width
        if self.design.ffn == "none":
            return self.mul(value, 0.5)
        if self.design.ffn == "moe":
            gates = self.op("Softmax", self.linear(value, f"router{layer}", width, 2), axis=-1)
            expert = [self._dense(value, f"ffn{layer}_{number}") for number in range(2)]
            shares = [self.part(gates, n, n + 1, 2) for n in range(2)]
            return self.add(self.mul(expert[0], shares[0]), self.mul(expert[1], shares[1]))
        return self._dense(value, f"ffn{layer}")

    def _dense(self, value: str, name: str) -> str:
        width = self.design.width
        up = self.linear(value, f"{name}_up", width, 48)
        if self.design.ffn == "gelu":
            up = self.mul(up, self.op("Sigmoid", self.mul(up, 1.702)))
        else:
            up = self.mul(up, self.silu(self.linear(value, f"{name}_gate", width, 48)))
        return self.linear(up, f"{name}_down", 48, width)

    # Outputs

    def _finish(self, hidden: str) -> None:
        logits = self.linear(hidden, "head", self.design.width, self.design.vocab)
        for extra in self.design.extras:
            if change := inputs.SCORED.get(extra):
                logits = change(self, logits)
        logits = self.at("logits", logits, "bsv")
        name, form = self.naming.port("logits"), self.design.logits
        made = inputs.LOGITS[form](self, logits)
        if isinstance(made, tuple):
            self.outputs += [(f"{name}_{number}", value, FLOAT) for number, value in enumerate(made)]
            name = f"{name}_0"
        else:
            self.outputs.append((name, made, INT if form.startswith("argmax") else FLOAT))
        if "hidden_out" in self.design.extras:
            self.outputs.append(("last_hidden_state", hidden, FLOAT))
        if "shares_out" in self.design.extras:
            self.outputs.append(("attentions", self.record["shares", -1], FLOAT))
        if "unused" in self.design.extras:
            self.input("reserved", FLOAT, "batch", 4)
        self.contract.logits = (name, form)
        inputs.keep(self)
        returned = [(slot.present, value, slot.kind) for value, slot in self.cache.finish()]
        self.outputs = returned + self.outputs if "cache_first" in self.design.extras else self.outputs + returned

    # What several mixers need

    def split(self, value: str, heads: int, dim: int) -> str:
        """[b, s, heads * dim] as [b, heads, s, dim]."""
        return self.move(self.op("Reshape", value, [0, 0, heads, dim]), 0, 2, 1, 3)

    def merged(self, value: str, width: int) -> str:
        """[b, heads, s, dim] as [b, s, heads * dim]."""
        return self.reshape(self.move(value, 0, 2, 1, 3), self.rows, self.new, width)

    def seen(self, key_slots: str, layer: int = 1) -> str:
        """bool[b, 1, s, t]: which keys each new token sees, by their slots [b, t] and the mask of the caller."""
        query = self.lift(self.at("mask.query", self.query_slots, "bs"), 1, 3)
        keys = self.lift(key_slots, 1, 2)
        seen = self.op("LessOrEqual", keys, query)
        if "prefix" in self.design.extras:
            length = self.input("prefix_length", INT, 1)
            seen = self.op("Or", seen, self.op("Less", keys, self.reshape(length, 1, 1, 1, 1)))
        if self.design.fixed:
            seen = self.both(seen, self.op("GreaterOrEqual", keys, 0))
        if self.design.window and (self.design.store != "mixed" or self.design.store_of(layer) == "cut"):
            near = self.op("Greater", keys, self.sub(query, self.design.window))
            if self.design.store == "sinks":
                near = self.op("Or", near, self.op("Less", keys, SINKS))
            seen = self.both(seen, near)
        if self.mask:
            seen = self.both(seen, self.mask)
        return self.at("seen", seen, "bhst")

    def extras_load(self, value: str, kind: Kind) -> str:
        """Rows of the past in the order of the beams, where the graph takes it."""
        if "beam_idx" not in self.design.extras:
            return value
        beams = self.input("beam_idx", INT32, "batch")
        order = kind.order or kind.axes
        return self.op("Gather", value, beams, axis=next(i for i, part in enumerate(axes_of(order)) if "b" in part))

    def bias(self, condition: str) -> str:
        """float: 0 where the condition holds, a large negative number otherwise."""
        return self.where(condition, 0.0, NEVER)

    def encoder_states(self) -> str:
        """float[b, encoder, width]: given, or made of the tokens of a source."""
        width = self.design.width
        if self.design.cross != "source":
            return self.input("encoder_hidden_states", FLOAT, "batch", "encoder", width)
        source = self.input("source_ids", INT, "batch", "encoder")
        states = self.op("Gather", self.weights.weight("source", self.design.vocab, width, scale=1.0), source)
        return self.add(states, self.mean(states, 1))

    def flag(self) -> str:
        """bool[1, 1]: whether there is a past."""
        return self.op("Greater", self.part(self.past, 0, 1, 0), 0)
