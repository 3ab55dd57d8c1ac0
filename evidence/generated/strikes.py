"""Where in the space of a decode loop a fault strikes, said once: as data, and as a condition inside a graph."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx

if TYPE_CHECKING:
    from .decoders import Body
    from .designs import Design


@dataclass(frozen=True)
class Strike:
    """The calls, and the parts of a call, in which a fault acts.

    A call is a past and its new tokens. `past_from`, `past_to` and `past_every` limit the past; `new_from` and `new_to`
    the new tokens; `across` is a length that the call begins before and ends behind. `row`, `position` (in the
    sequence), `token` (of the chunk), `head` and `layer` choose inside the call. `branch` is step, prefill, or any: in
    one graph for both, a step is a call with a past. `encoder_from` is the least number of encoder states.
    """

    past_from: int = 0
    past_to: int | None = None
    past_every: int | None = None
    new_from: int = 1
    new_to: int | None = None
    across: int | None = None
    row: int | None = None
    position: int | None = None
    token: int | None = None
    head: int | None = None
    layer: int | None = None
    branch: str = "step"
    encoder_from: int = 0

    def hits(self, past: int, new: int, prefill: bool) -> bool:
        """Whether a call is struck at all, by its lengths."""
        return (
            self.branch in ("any", "prefill" if prefill else "step")
            and self.past_from <= past
            and (self.past_to is None or past <= self.past_to)
            and (self.past_every is None or past % self.past_every == 0)
            and self.new_from <= new
            and (self.new_to is None or new <= self.new_to)
            and (self.across is None or past < self.across < past + new)
            and (self.token is None or self.token < new)
            and (self.position is None or past <= self.position < past + new)
        )

    def condition(self, body: "Body", value: str, axes: str) -> str | None:
        """The same in the graph: bool, to broadcast with a value of these axes. None: always."""
        limits = (
            ("GreaterOrEqual", body.past, self.past_from if self.past_from > 1 else None),
            ("LessOrEqual", body.past, self.past_to),
            ("GreaterOrEqual", body.new, self.new_from if self.new_from > 1 else None),
            ("LessOrEqual", body.new, self.new_to),
            ("Less", body.past, self.across),
            ("Greater", body.total, self.across),
            ("GreaterOrEqual", body.encoder_length, self.encoder_from or None),
        )
        terms = [body.op(kind, length, [limit]) for kind, length, limit in limits if limit is not None]
        if body.branch == "single" and self.branch != "any":
            terms.append(body.op("Greater" if self.branch == "step" else "LessOrEqual", body.past, [0]))
        if self.past_every is not None:
            terms.append(body.op("Equal", body.op("Mod", body.past, [self.past_every]), [0]))
        for axis, chosen in (("b", self.row), ("s", self.token), ("h", self.head)):
            if chosen is not None and axis in axes:
                terms.append(body.op("Equal", body.index(value, axes, axis), chosen))
        if self.position is not None:
            at = body.op("Equal", body.query_at, self.position)
            terms.append(body.op("Unsqueeze", at, [i for i, axis in enumerate(axes) if axis != "s"]))
        return body.all_of(*terms) if terms else None


@dataclass(frozen=True)
class Walk:
    """One way through a decode loop: the tokens of each call, the rows, the padding of each row, encoder states."""

    chunks: tuple[int, ...]
    rows: int = 1
    pads: tuple[int, ...] = ()
    encoder: tuple[int, ...] = (9,)

    @property
    def length(self) -> int:
        return sum(self.chunks)


Wrong = Callable[["Body", str, int], str]
Fits = Callable[["Design"], bool]
Edit = Callable[[dict[str, onnx.ModelProto], "Design"], None]


def anywhere(design: "Design") -> bool:
    return True


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Either `wrong` makes another value at a `point` of the graph in the making, where `strike` says; or `edit` changes
    the finished models. `walk` is the smallest walk that shows it, `accept` the names of checks that name it well, and
    `fits` whether a design can have it. A fault that `fails` makes the runtime refuse a call of the walk.
    """

    name: str
    point: str = ""
    wrong: Wrong | None = None
    strike: Strike = field(default_factory=Strike)
    walk: Walk = field(default_factory=lambda: Walk((9, 1, 1, 1)))
    accept: tuple[str, ...] = ("cached-differs",)
    fits: Fits = anywhere
    edit: Edit | None = None
    fails: bool = False
    outright: bool = False
    """The wrong value has another shape: it takes the place of the right one without a condition."""
