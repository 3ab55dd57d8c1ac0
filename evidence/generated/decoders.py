"""Decoders written node by node: the body of one graph, or of one branch of it. `designs` has the letters of axes."""

import numpy as np

from .designs import BUCKETS, CAPACITY, NEVER, PARTS, ROWS, WINDOW, Design
from .sheet import BOOL, FAR, FLOAT, Sheet, Weights
from .strikes import Fault


class Body(Sheet):
    """The nodes of one graph or branch: `branch` is single (with or without a past), prefill, or step."""

    def __init__(self, design: Design, weights: Weights, branch: str, fault: Fault | None, prefix: str = "") -> None:
        super().__init__(weights, prefix)
        self.design, self.branch, self.fault = design, branch, fault
        self.made: dict[tuple[int, str, bool], str] = {}
        self.record: dict[tuple[str, int], str] = {}
        self.ids = design.called("input_ids")
        self.new = self.size(self.ids, 1)
        self.past = self._past_length()
        self.total = self.op("Add", self.past, self.new)
        self.encoder_length = self.size("encoder_attention_mask", 1) if design.encoder else ""
        self.query_at = self.op("Add", self.count(self.new), self.past)
        self.key_at = self._key_at()
        self.tokens = self.hook("tokens", self.ids, "bs")
        self.positions = self.hook("positions", self._positions(), "bs")
        self.seen = self._seen()
        self.logits = self._logits()

    def hook(self, point: str, value: str, axes: str, layer: int = -1) -> str:
        """Where a fault may take the place of a value."""
        self.record[point, layer] = value
        fault = self.fault
        if fault is None or fault.wrong is None or fault.point != point or fault.strike.layer not in (None, layer):
            return value
        if fault.strike.branch not in ("any", self.branch) and self.branch != "single":
            return value
        wrong = fault.wrong(self, value, layer)
        condition = None if fault.outright else fault.strike.condition(self, value, axes)
        if condition is None:
            return wrong
        if point == "seen":  # the runtime has no Where of bool
            struck = self.op("And", condition, wrong)
            return self.op("Or", struck, self.op("And", self.op("Not", condition), value))
        return self.op("Where", condition, wrong, value)

    # Lengths and places

    def length(self, value: str, axes: str, axis: str) -> str:
        """A mask has one row and one head for all."""
        if axis == "b":
            return self.size(self.ids, 0)
        if axes == "bhst" and axis == "h":
            return self.weights.constant([self.design.heads])
        return super().length(value, axes, axis)

    def _past_length(self) -> str:
        design = self.design
        if self.branch == "prefill":
            return self.weights.constant([0])
        if design.buffered:
            return self.part(design.called("slot"), [0], [1], 0)
        slot = next(slot for slot in design.slots if not slot.cross)
        return self.size(slot.past, slot.order.index("p"))

    def _key_at(self) -> str:
        """The position in the sequence of each key that attention sees; negative where a slot is empty: int64[t]."""
        if self.design.layout == "static":
            return self.weights.constant(np.arange(CAPACITY))
        if self.design.layout == "ring":
            newest = self.op("Sub", self.past, [1])
            age = self.op("Mod", self.op("Sub", newest, np.arange(WINDOW)), [WINDOW])
            return self.op("Concat", self.op("Sub", newest, age), self.query_at, axis=0)
        return self.count(self.total)

    def _positions(self) -> str:
        """The position of each new token: int64[b, s], or [1, s]."""
        design = self.design
        if design.counted == "input":
            return design.called("position_ids")
        if design.counted == "mask":
            summed = self.op("CumSum", design.called("attention_mask"), np.int64(1))
            return self.last(self.op("Max", self.op("Sub", summed, [1]), [0]), self.new, 1)
        return self.op("Unsqueeze", design.called("slot") if design.buffered else self.query_at, [0])

    def distance(self) -> str:
        """How far each key lies behind each query: int64[s, t]."""
        return self.op("Sub", self.op("Unsqueeze", self.query_at, [1]), self.op("Unsqueeze", self.key_at, [0]))

    def _seen(self) -> str:
        """Which keys a new token may attend to: bool[b or 1, 1, s, t]."""
        design = self.design
        far = self.distance()
        seen = self.op("GreaterOrEqual", far, 0)
        if design.layout == "ring":
            young = self.op("Less", far, WINDOW)
            seen = self.all_of(seen, young, self.op("Unsqueeze", self.op("GreaterOrEqual", self.key_at, 0), [0]))
        seen = self.op("Unsqueeze", seen, [0, 1])
        if design.mask == "mask2d":
            kept = self.cast(self.hook("padding", design.called("attention_mask"), "bt"), BOOL)
            seen = self.op("And", seen, self.op("Unsqueeze", kept, [1, 2]))
        return seen

    def masked(self, scores: str, layer: int) -> str:
        """Scores of what may not be seen are driven out: float[b, h, s, t]."""
        design = self.design
        if design.mask in ("built", "mask2d"):
            return self.op("Where", self.hook("seen", self.seen, "bhst", layer), scores, NEVER)
        if design.mask == "mask4d":
            added = design.called("attention_mask")
        else:
            table = np.triu(np.full((ROWS, ROWS), NEVER), 1)[None, None]
            added = self.part(self.part(self.weights.constant(table), self.past, self.total, 2), [0], self.total, 3)
        if self.fault is not None and self.fault.point == "seen":
            seen = self.hook("seen", self.op("Greater", added, -1.0), "bhst", layer)
            added = self.op("Where", seen, 0.0, NEVER)
        return self.op("Add", scores, added)

    # Layers

    def weight(self, name: str, *shape: int, scale: float = 1.0) -> str:
        return self.weights.normal(name, shape, scale / np.sqrt(shape[0]))

    def _logits(self) -> str:
        design = self.design
        table = self.weights.normal("embedding", (design.vocabulary, design.width))
        x = self.op("Gather", table, self.tokens)
        if design.position == "learned":
            x = self.op(
                "Add", x, self.op("Gather", self.weights.normal("places", (ROWS, design.width)), self.positions)
            )
        if design.position == "sinusoidal":
            angles = self._angles(design.width)
            x = self.op("Add", x, self.op("Concat", self.op("Sin", angles), self.op("Cos", angles), axis=-1))
        x = self.hook("embedded", x, "bsx")
        for layer in range(design.layers):
            self.record["before", layer] = x
            x = self.op("Add", x, self.hook("attention", self._attention(layer, self.normed(x, layer)), "bsx", layer))
            if design.encoder:
                x = self.op("Add", x, self._cross(layer, self.normed(x, layer)))
            x = self.op("Add", x, self.hook("mlp", self.mlp(self.normed(x, layer), layer), "bsx", layer))
            x = self.hook("hidden", x, "bsx", layer)
        x = self.normed(x, design.layers)
        return self.hook(
            "logits", self.op("MatMul", x, self.weight("head", design.width, design.vocabulary, scale=6.0)), "bsv"
        )

    def normed(self, x: str, layer: int) -> str:
        width = self.design.width
        ones, zeros = np.linspace(0.9, 1.1, width), np.zeros(width)
        if self.design.norm == "layer":
            made = self.op("LayerNormalization", x, ones, zeros, axis=-1)
        else:
            if self.design.norm == "spelled":
                x = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
            spread = self.op("Sqrt", self.op("Add", self.op("ReduceMean", self.op("Mul", x, x), axes=[-1]), 1e-5))
            made = self.op("Mul", self.op("Div", x, spread), ones)
        return self.hook("normed", made, "bsx", layer)

    def mlp(self, x: str, layer: int, weights_of: int | None = None) -> str:
        width, layer = self.design.width, layer if weights_of is None else weights_of
        inner = self.op("MatMul", x, self.weight(f"layers.{layer}.up", width, 2 * width))
        inner = self.op("Mul", inner, self.op("Sigmoid", inner))
        return self.op("MatMul", inner, self.weight(f"layers.{layer}.down", 2 * width, width))

    def heads(self, x: str, name: str, count: int) -> str:
        """A projection: float[b, h, s, d]."""
        design = self.design
        made = self.op("MatMul", x, self.weight(name, design.width, count * design.depth))
        return self.op("Transpose", self.op("Reshape", made, [0, 0, count, design.depth]), perm=[0, 2, 1, 3])

    def joined(self, value: str, name: str) -> str:
        """All heads projected: float[b, s, x]."""
        width = self.design.width
        rows = self.op("Reshape", self.op("Transpose", value, perm=[0, 2, 1, 3]), [0, 0, width])
        return self.op("MatMul", rows, self.weight(name, width, width, scale=1.4))

    def _angles(self, width: int) -> str:
        """float[b, s, width / 2]."""
        rates = 1000.0 ** (-np.arange(width // 2) / (width // 2))
        places = self.op("Unsqueeze", self.cast(self.positions, FLOAT), [2])
        return self.hook("angles", self.op("Mul", places, rates), "bsx")

    def rotated(self, value: str) -> str:
        """Rotary positions of the new tokens: float[b, h, s, d]."""
        depth = self.design.depth
        angles = self.op("Unsqueeze", self._angles(depth), [1])
        cos, sin = self.op("Cos", angles), self.op("Sin", angles)
        one, two = self.part(value, [0], [depth // 2], 3), self.part(value, [depth // 2], [FAR], 3)
        left = self.op("Sub", self.op("Mul", one, cos), self.op("Mul", two, sin))
        right = self.op("Add", self.op("Mul", two, cos), self.op("Mul", one, sin))
        return self.op("Concat", left, right, axis=3)

    def _attention(self, layer: int, x: str) -> str:
        design = self.design
        query = self.heads(x, f"layers.{layer}.query", design.heads)
        new = {part: self.heads(x, f"layers.{layer}.{part}", design.kv_heads) for part in PARTS}
        if design.position == "rotary":
            query = self.rotated(query)
            self.record["plain key", layer] = new["key"]
            new["key"] = self.hook("rotated key", self.rotated(new["key"]), "bhsd", layer)
        query = self.hook("query", query, "bhsd", layer)
        for part in PARTS:
            self.record[f"made {part}", layer] = new[part]
        whole = {part: self._whole(layer, part, self.hook(f"new {part}", new[part], "bhsd", layer)) for part in PARTS}
        made = self.attend(query, whole["key"], whole["value"], layer)
        return self.joined(made, f"layers.{layer}.out")

    def _whole(self, layer: int, part: str, new: str) -> str:
        """What attention sees; what the cache keeps is recorded: float[b, h, t, d]."""
        layout = self.design.layout
        kept = self.hook(f"kept {part}", new, "bhsd", layer)
        if self.branch == "prefill":
            self.made[layer, part, False] = self.hook(f"present {part}", kept, "bhtd", layer)
            return new
        past = self._past(layer, part)
        read = self.hook(f"read {part}", past, "bhpd", layer)
        if layout == "static":
            at = self.hook("write at", self.design.called("slot"), "s", layer)
            whole, present = self._written(read, new, at), self._written(past, kept, at)
        elif layout == "ring":
            whole = self.op("Concat", read, new, axis=2)
            at = self.op("Mod", self.last(self.design.called("slot"), WINDOW, 0), [WINDOW])
            present = self._written(past, self.last(kept, WINDOW, 2), self.hook("write at", at, "s", layer))
        else:
            whole = self.op("Concat", read, new, axis=2)
            present = kept if layout == "delta" else self.op("Concat", past, kept, axis=2)
        self.made[layer, part, False] = self.hook(f"present {part}", present, "bhtd", layer)
        return self.hook(f"whole {part}", whole, "bhtd", layer)

    def _written(self, buffer: str, rows: str, at: str) -> str:
        """Rows at their places in a buffer: float[b, h, c, d]."""
        turned = [self.op("Transpose", value, perm=[2, 0, 1, 3]) for value in (buffer, rows)]
        done = self.op("ScatterND", turned[0], self.op("Unsqueeze", at, [1]), turned[1])
        return self.op("Transpose", done, perm=[1, 2, 0, 3])

    def _past(self, layer: int, part: str, cross: bool = False) -> str:
        """float[b, h, p, d]."""
        design = self.design
        if cross or design.layout not in ("stacked", "fused"):
            slot = next(slot for slot in design.slots if slot.key == (layer, part) and slot.cross == cross)
            to = "".join(letter for letter in "bhpecrd" if letter in slot.order)
            return self.turned(slot.past, slot.order, to)
        held = design.slots[0].past
        if design.layout == "stacked":
            held = self.op("Gather", held, layer, axis=0)
        else:
            held = next(slot.past for slot in design.slots if slot.key[0] == layer and not slot.cross)
        return self.op("Gather", held, PARTS.index(part), axis=0)

    def attend(self, query: str, key: str, value: str, layer: int) -> str:
        """float[b, h, s, d]."""
        scores = self.scored(query, key)
        if self.design.position in ("alibi", "relative"):
            scores = self.op("Add", scores, self.hook("bias", self._bias(layer), "hst", layer))
        scores = self.hook("scores", self.masked(scores, layer), "bhst", layer)
        made = self.op("MatMul", self.op("Softmax", scores, axis=-1), self.spread(value))
        return self.hook("heads out", made, "bhsd", layer)

    def scored(self, query: str, key: str) -> str:
        scores = self.op("MatMul", query, self.op("Transpose", self.spread(key), perm=[0, 1, 3, 2]))
        return self.op("Mul", scores, 1.3 / np.sqrt(self.design.depth))

    def spread(self, value: str) -> str:
        """Key and value heads repeated for the attention heads of their group."""
        design = self.design
        times = design.heads // design.kv_heads
        if times == 1:
            return value
        wide = self.op("Unsqueeze", value, [2])
        length = self.size(value, 2)
        shape = self.op("Concat", self.size(value, 0), [design.kv_heads, times], length, [design.depth], axis=0)
        return self.op("Reshape", self.op("Expand", wide, shape), [0, design.heads, -1, design.depth])

    def _bias(self, layer: int) -> str:
        """float[h, s, t]."""
        far = self.hook("distance", self.distance(), "st", layer)
        if self.design.position == "alibi":
            slopes = -0.05 / 2.0 ** np.arange(self.design.heads)
            return self.op("Mul", self.op("Unsqueeze", self.cast(far, FLOAT), [0]), slopes[:, None, None])
        bucket = self.op("Min", self.op("Max", far, [0]), [BUCKETS - 1])
        rows = self.op("Gather", self.weights.normal("biases", (BUCKETS, self.design.heads)), bucket)
        return self.op("Transpose", rows, perm=[2, 0, 1])

    def made_cross(self, layer: int, part: str) -> str:
        """The cross-attention cache of the encoder's states: float[b, h, e, d]."""
        return self.heads("encoder_hidden_states", f"layers.{layer}.cross.{part}", self.design.kv_heads)

    def _cross(self, layer: int, x: str) -> str:
        design, whole = self.design, {}
        for part in PARTS:
            fresh = self.branch == "prefill"
            held = self.made_cross(layer, part) if fresh else self._past(layer, part, cross=True)
            whole[part] = self.hook(f"cross {part}", held, "bhed", layer)
            self.made[layer, part, True] = self.hook(f"cross present {part}", held, "bhed", layer)
        scores = self.scored(self.heads(x, f"layers.{layer}.cross.query", design.heads), whole["key"])
        kept = self.hook("encoder mask", "encoder_attention_mask", "be", layer)
        scores = self.op("Where", self.op("Unsqueeze", self.cast(kept, BOOL), [1, 2]), scores, NEVER)
        made = self.op("MatMul", self.op("Softmax", scores, axis=-1), self.spread(whole["value"]))
        return self.joined(made, f"layers.{layer}.cross.out")

    # What leaves the graph

    def results(self) -> dict[str, str]:
        """The value of each output by its name."""
        design = self.design
        found = {design.called("logits"): self.logits}
        for slot in design.slots:
            if not slot.present or (slot.cross and design.encoder == "held" and self.branch == "step"):
                continue
            layer, part = slot.key
            if slot.order == "LPbhpd":
                pairs = [self._pair(i) for i in range(design.layers)]
                found[slot.present] = self.op("Concat", *(self.op("Unsqueeze", pair, [0]) for pair in pairs), axis=0)
            elif part == "both":
                found[slot.present] = self._pair(layer)
            else:
                to = slot.order.translate(str.maketrans("cre", "ppp"))
                found[slot.present] = self.turned(self.made[layer, part, slot.cross], "bhpd", to)
        return found

    def _pair(self, layer: int) -> str:
        return self.op("Concat", *(self.op("Unsqueeze", self.made[layer, part, False], [0]) for part in PARTS), axis=0)
