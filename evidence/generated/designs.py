"""What a generated decoder is like, and the tensors of its cache.

Letters of axes: b batch, h heads, s new tokens, p past, t past and new (or what attention sees), d head_dim, x hidden,
e encoder states, c capacity of a buffer, r length of a ring, L layers, P key and value.
"""

from dataclasses import dataclass
from functools import cached_property

from .sheet import Size

CAPACITY, WINDOW, ROWS, BUCKETS, NEVER = 160, 24, 256, 32, -1e9
NEW, PAST, TOTAL, STATES = "sequence_length", "past_length", "past_length + sequence_length", "encoder_length"
PARTS = ("key", "value")
ROLES = {
    "optimum": {},
    "own": {
        "input_ids": "tokens",
        "attention_mask": "keep",
        "position_ids": "at",
        "logits": "scores",
        "slot": "write_at",
    },
    "numbered": {"input_ids": "x", "attention_mask": "m", "position_ids": "p", "logits": "y", "slot": "i"},
}
PAST_NAMES = {"optimum": "past_key_values.{who}{part}", "own": "mem_{who}{part}", "numbered": "in{n}"}
PRESENT_NAMES = {"optimum": "present.{who}{part}", "own": "mem_{who}{part}_out", "numbered": "out{n}"}


@dataclass(frozen=True)
class Design:
    """What a decoder is like.

    `layout`: bhsd, bshd, bhds (keys transposed), stacked (one tensor for all), fused (key and value in one tensor),
    static, ring, delta. `files`: single, pair (without and with a cache), merged. `encoder`: none, held (the step does
    not return the cross-attention cache), passed (it does), given (the encoder file returns it). `position`: learned,
    sinusoidal, rotary, alibi, relative, none. `counted`, how positions are known: past, mask (its sum), input. `mask`:
    built, mask2d, mask4d, table. `norm`: layer, rms, spelled.
    """

    layout: str = "bhsd"
    files: str = "single"
    encoder: str = ""
    heads: int = 4
    kv_heads: int = 4
    position: str = "learned"
    counted: str = "past"
    mask: str = "built"
    names: str = "optimum"
    norm: str = "layer"
    layers: int = 4
    width: int = 48
    vocabulary: int = 1000
    seed: int = 0

    @property
    def depth(self) -> int:
        """head_dim."""
        return self.width // self.heads

    @property
    def buffered(self) -> bool:
        return self.layout in ("static", "ring")

    @property
    def padded(self) -> bool:
        """Whether a mask can exclude padding."""
        return self.mask in ("mask2d", "mask4d")

    @property
    def branched(self) -> bool:
        return self.files != "single"

    def called(self, role: str) -> str:
        return ROLES[self.names].get(role, {"slot": "cache_position"}.get(role, role))

    @cached_property
    def slots(self) -> tuple["Slot", ...]:
        """The cache tensors in the order of the graph's inputs."""
        found: list[Slot] = []

        def add(key: tuple[int, str], who: str, part: str, order: str, cross: bool = False) -> None:
            said = {"who": who, "part": part, "n": len(found)}
            name = PRESENT_NAMES[self.names].format(**said)
            kept = self.encoder == "given" or (self.encoder == "held" and self.files != "pair")
            past = PAST_NAMES[self.names].format(**said)
            found.append(Slot(self, key, past, "" if cross and kept else name, order, cross))

        if self.layout == "stacked":
            add((0, "all"), "", "all" if self.names == "own" else "0", "LPbhpd")
        for layer in range(self.layers):
            who = f"{layer}.decoder." if self.encoder and self.names == "optimum" else f"{layer}."
            if self.layout == "fused":
                add((layer, "both"), who.rstrip("."), "", "Pbhpd")
            elif self.layout != "stacked":
                for part in PARTS:
                    add((layer, part), who, part, self.order(part))
            for part in PARTS if self.encoder else ():
                add(
                    (layer, part),
                    who.replace("decoder", "encoder") if "d" in who else f"{who}cross_",
                    part,
                    "bhed",
                    True,
                )
        return tuple(found)

    def order(self, part: str) -> str:
        known = {"bshd": "bphd", "bhds": "bhdp" if part == "key" else "bhpd", "static": "bhcd", "ring": "bhrd"}
        return known.get(self.layout, "bhpd")


@dataclass(frozen=True)
class Slot:
    """One cache tensor: its names, and its axes in the order in which it is stored."""

    design: Design
    key: tuple[int, str]
    past: str
    present: str
    order: str
    cross: bool

    def shape(self, length: Size) -> tuple[Size, ...]:
        """As declared; `length` stands for the axis that grows."""
        sizes: dict[str, Size] = {"L": self.design.layers, "P": 2, "b": "batch_size", "h": self.design.kv_heads}
        sizes |= {"p": length, "d": self.design.depth, "e": STATES, "c": CAPACITY, "r": WINDOW}
        return tuple(sizes[letter] for letter in self.order)


BASES: dict[str, Design] = {
    "gpt2-like": Design(mask="mask2d", counted="mask", seed=1),
    "llama-like": Design(kv_heads=2, position="rotary", mask="mask2d", counted="input", norm="rms", seed=2),
    "mqa alibi": Design(layout="bshd", kv_heads=1, position="alibi", names="own", width=64, seed=3),
    "transposed keys": Design(layout="bhds", position="sinusoidal", names="numbered", norm="spelled", layers=5, seed=4),
    "stacked": Design(layout="stacked", position="rotary", names="own", kv_heads=2, norm="rms", seed=5),
    "fused": Design(layout="fused", mask="table", names="own", seed=6),
    "static": Design(layout="static", position="rotary", names="own", norm="rms", seed=7),
    "static learned": Design(layout="static", kv_heads=2, layers=6, width=32, seed=8),
    "ring": Design(layout="ring", position="rotary", names="own", norm="rms", seed=9),
    "delta": Design(layout="delta", position="rotary", names="own", norm="rms", kv_heads=2, seed=10),
    "pair": Design(files="pair", mask="mask2d", counted="mask", norm="spelled", layers=4, seed=11),
    "merged": Design(files="merged", position="rotary", mask="mask2d", counted="mask", norm="rms", kv_heads=2, seed=12),
    "merged alibi": Design(files="merged", position="alibi", names="own", layers=6, width=32, seed=13),
    "4-D mask": Design(position="rotary", mask="mask4d", counted="input", norm="rms", layers=8, width=32, seed=14),
    "relative": Design(position="relative", kv_heads=2, norm="rms", seed=15),
    "no positions": Design(position="none", layout="bshd", names="numbered", seed=16),
    "encoder merged": Design(files="merged", encoder="passed", seed=17),
    "encoder pair": Design(files="pair", encoder="held", position="relative", norm="rms", seed=18),
    "encoder given": Design(encoder="given", position="sinusoidal", names="own", norm="spelled", seed=19),
    "encoder merged rotary": Design(
        files="merged", encoder="passed", position="rotary", kv_heads=2, norm="rms", seed=20
    ),
}
