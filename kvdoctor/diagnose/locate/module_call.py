"""One call of a checkpoint: its modules, and the parts of the decoder that they belong to by their names.

The parts are the embedding, each layer's attention and MLP, the final norm and the head. A norm of a layer is a part by
its own name, such as `input_layernorm`: it stands before or behind the attention.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.decode.runs import PartDifference
from kvdoctor.diagnose.locate.runnable import LAYER
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.decode.calls import Array

NORM = re.compile(r"norm|\bln_|(?:^|[._])ln\d?(?:[._]|$)", re.IGNORECASE)
CROSS = re.compile(r"encoder_attn|cross_?attn|EncDecAttention|cross_attention", re.IGNORECASE)
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
MIXER = re.compile(r"mixer|mamba|linear_attn|conv", re.IGNORECASE)
MLP = re.compile(r"mlp|ffn?|feed_?forward|fc\d?|dense|moe|experts", re.IGNORECASE)


@record(slots=False)
class Module:
    """A module of the checkpoint: all its names, its class, and what it was given and gave."""

    names: tuple[str, ...]
    kind: str
    given: "Array | None"
    gave: "Array | None"

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def shown(self) -> str:
        """How people call it."""
        return f"{self.name} ({self.kind})" if self.name else f"the model itself ({self.kind})"


@record(slots=False)
class ModuleCall:
    """One call of the checkpoint: its modules in the order in which they ended, the names of two, and the feeds."""

    modules: tuple[Module, ...]
    embedding: str
    head: str
    feeds: Path


def list_parts(call: ModuleCall, differences: Mapping[str, float], limit: float) -> tuple[PartDifference, ...]:
    """The parts in the order of the graph, each with the largest difference of its modules."""
    found: dict[tuple[int | None, str], float] = {}
    for module in call.modules:
        key = part_of(module.names, call.embedding, call.head)
        if key is None or module.name not in differences:
            continue
        relative, worst = differences[module.name], found.get(key, 0.0)
        found[key] = -1.0 if min(relative, worst) < 0 else max(relative, worst)
    off = [key for key, relative in found.items() if not 0 <= relative <= limit]
    return tuple(
        PartDifference(name, layer, float(f"{relative:.3g}"), (layer, name) in off)
        for (layer, name), relative in found.items()
    )


def part_of(names: tuple[str, ...], embedding: str, head: str) -> tuple[int | None, str] | None:
    """The layer and the part that a module belongs to; None for those that hold several parts."""
    for name in names:
        if name and name in (embedding, head):
            return None, "embedding" if name == embedding else "head"
    match = LAYER.search(names[0])
    if match is None:
        last = names[0].rsplit(".", 1)[-1]
        return (None, "final norm") if last and NORM.search(last) and "embed" not in last else None
    rest = [part for part in names[0][match.end() :].split(".") if part]
    for part in rest:
        if not NORM.search(part):
            for pattern, kind in ((CROSS, "cross-attention"), (ATTENTION, "attention"), (MIXER, "mixer"), (MLP, "MLP")):
                if pattern.search(part):
                    return int(match[1]), kind
        elif part is rest[-1]:
            return int(match[1]), part
    return None
