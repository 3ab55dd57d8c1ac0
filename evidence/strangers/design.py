"""What a decoder of a stranger is like, and what a caller must feed it: the choices of a drawing, no nodes yet."""

from dataclasses import dataclass, field

ENCODER, CAPACITY, WINDOW, SINKS = 7, 48, 8, 2
"""Encoder states; slots of a fixed cache; slots of a ring or a shifted cache; first tokens that are never cut."""


@dataclass(frozen=True)
class Design:
    """One decoder. The letters of `order`: l layers, c key or value, b batch, h heads, s sequence, d width, 1 an axis
    of one; letters in parentheses share an axis.
    """

    name: str
    mixers: tuple[str, ...] = ("attention", "attention")
    heads: int = 4
    kv: int = 2
    dim: int = 8
    width: int = 32
    vocab: int = 97
    norm: str = "rms"
    block: str = "serial"
    ffn: str = "swiglu"
    rotary: str = "full"
    positions: str = "rotary"
    counted: str = "shape"
    order: str = "bhsd"
    state_order: str = ""
    store: str = "grow"
    write: str = "where"
    window: int = 0
    mask: str = "none"
    names: str = "optimum"
    logits: str = "bsv"
    extras: tuple[str, ...] = ()
    files: str = "one"
    cross: str = ""
    recurrence: str = "scan"
    one_token: bool = False
    batch_one: bool = False
    opset: int = 18
    seed: int = 0

    @property
    def per_row(self) -> bool:
        """Whether the number of past tokens is counted for each row."""
        return self.counted in ("past_lengths", "lengths", "lasts", "position_ids", "mask")

    def store_of(self, layer: int) -> str:
        """How a layer keeps its entries: mixed ones cut every other layer to the window."""
        return ("cut", "grow")[layer % 2] if self.store == "mixed" else self.store

    def kv_of(self, layer: int) -> int:
        return 1 if "hetero" in self.extras and layer % 2 else self.kv

    @property
    def fixed(self) -> int:
        """The slots of a cache of a fixed size; 0 where it grows."""
        return {"static": CAPACITY, "ring": WINDOW, "shift": WINDOW}.get(self.store, 0)


@dataclass(frozen=True)
class Port:
    """An input beside the cache: what it means, its element type, and the letters or numbers of its axes."""

    name: str
    role: str
    kind: int
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class Slot:
    """A part of the cache. `growth`: grow, delta (the caller appends it), replace, or held."""

    past: str
    present: str
    kind: int
    shape: tuple[str | int, ...]
    axis: int
    growth: str


@dataclass
class Contract:
    """What a caller feeds and reads."""

    ports: list[Port] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    logits: tuple[str, str] = ("logits", "bsv")
    """The name of the output, and the form of the logits."""


@dataclass(frozen=True)
class Naming:
    """How a stranger names ports: templates with a layer and a part, and words for the inputs."""

    past: str
    present: str
    parts: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def port(self, role: str) -> str:
        return self.words.get(role, role)

    def slot(self, kind: str, layer: int, number: int) -> tuple[str, str]:
        """The names of past and present; stacked layers have the number -1."""
        part = self.parts.get(kind, kind)
        if kind in ("length", "last_token"):
            return self.words.get(kind, kind), f"{self.words.get(kind, kind)}_out"
        index = "" if layer < 0 else str(layer)
        values = {"l": index, "p": part, "n": number, "N": number + 1, "L": "all" if layer < 0 else layer + 1}
        values["letter"] = "abcdefghijklmnop"[number]
        clean = [form.format(**values).strip("._").replace("..", ".") for form in (self.past, self.present)]
        return clean[0], clean[1]


KV = {"k": "key", "v": "value", "kv": "key_value"}
GERMAN = {"input_ids": "eingabe", "attention_mask": "maske", "position_ids": "positionen", "logits": "ausgabe"}
SHORT = {"input_ids": "x", "attention_mask": "m", "position_ids": "pos", "logits": "y", "past_length": "n"}
NAMINGS = {
    "optimum": Naming("past_key_values.{l}.{p}", "present.{l}.{p}", KV),
    "hf": Naming("input.past_key_values.layers.{l}.{p}s", "output.past_key_values.layers.{l}.{p}s", KV),
    "ort": Naming("past_{p}_{l}", "present_{p}_{l}", KV),
    "torch": Naming("arg{N}", "cat_{n}", {}, {"input_ids": "arg0", "logits": "linear_14", "attention_mask": "arg_m"}),
    "own": Naming(
        "{p}buf{l}",
        "{p}buf{l}_out",
        {},
        {"input_ids": "tokens", "past_length": "offset", "use_cache_branch": "with_past"},
    ),
    "cache": Naming("cache_{p}_{l}", "new_cache_{p}_{l}", KV, {"input_ids": "token_ids"}),
    "memory": Naming("mem_in_{n}", "mem_out_{n}", {}, {"input_ids": "words", "logits": "scores"}),
    "german": Naming("speicher_{L}_{p}_ein", "speicher_{L}_{p}_aus", {"k": "schluessel", "v": "wert"}, GERMAN),
    "numbered": Naming("in_{N}", "out_{N}", {}, {"input_ids": "in_0", "logits": "out_0"}),
    "short": Naming("{p}{l}", "{p}{l}n", {}, SHORT),
    "rnn": Naming("state{n}_in", "state{n}_out", {}, {"input_ids": "input"}),
    "pairs": Naming("prev_{letter}", "next_{letter}", {}, {"input_ids": "token", "logits": "prob"}),
    "camel": Naming("layer{L}Past{p}", "layer{L}Present{p}", {"k": "Key", "v": "Value"}, {"input_ids": "inputIds"}),
    "qeff": Naming("past_{p}.{l}", "past_{p}.{l}_RetainedState", KV),
    "onnx23": Naming("kv.{l}.{p}.past", "kv.{l}.{p}.present", {}, {"input_ids": "ids", "logits": "lm_head"}),
}
