"""How places are put into words. Names from the model stand as they are; renderers make them harmless."""

import re
from collections.abc import Mapping, Sequence

from kvdoctor.contract import CacheContract
from kvdoctor.place.flat import FlatNode
from kvdoctor.place.origins import Source
from kvdoctor.trace import Node

LAYER = re.compile(r"(?:^|[./_])(?:layers?|h|blocks?|decoder_layers?)[./_]?(\d+)(?=[./_]|$)")
"""How exporters number layers in names: `/model/layers.0/...`, `transformer.h.3.`, `block.1`."""

MOST_THROUGH = 2


def node_of(node: FlatNode) -> Node:
    """The node as the file names it; one without a name by the first value that it makes."""
    return Node(str(node.origin.name) or next(iter(node.origin.output), ""), node.op)


def scope_of(node: FlatNode) -> str:
    """The branches and functions that it stands in, outer ones first."""
    return node.scope.removesuffix(", ")


def layer_of(*names: str) -> int | None:
    """The layer that the first of some names speaks of."""
    found = (LAYER.search(name) for name in names)
    return next((int(match[1]) for match in found if match), None)


def layers(contract: CacheContract) -> dict[str, int]:
    """The layer of each past."""
    return {slot.past: slot.layer for slot in contract.slots if slot.layer is not None}


def layer_in(node: FlatNode, pasts: Mapping[str, int]) -> int | None:
    """The layer of a node: by its name, else that of a past which it reads itself.

    What a node is computed from does not tell: the projections of a layer know the pasts of earlier ones alone.
    """
    named = layer_of(node.origin.name, *node.origin.output)
    return named if named is not None else next((pasts[name] for name in node.reads if name in pasts), None)


def origin_words(size: int, sources: Sequence[Source]) -> str:
    """Why a size or number is what it is."""
    fed = [s for s in sources if s.kind in ("fed length", "fed value")]
    others = [s for s in sources if s not in fed]
    if not sources:
        return "where it comes from could not be told"
    fed = [s for s in fed if s.size == size == 0] or fed
    words = []
    for kind, verb in (("fed length", "was fed length"), ("fed value", "was fed number")):
        for numbers, names in _alike([s for s in fed if s.kind == kind]).items():
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            words.append(f"{names[0]}{more} {verb}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}")
    baked = [s for s in others if s.kind == "constant" and s.size > 1]
    for source in baked[:1] if fed else others[:2]:
        holds = f" {source.text}" if source.text and source.kind == "constant" else ""
        what = "the constant" if source.kind == "constant" else "the weight"
        words.append(f"{what} {source.name}{holds} has {source.size}")
    through = list(dict.fromkeys(name for name in max((s.through for s in sources), key=len)))
    way = f", through {' and '.join(through[:MOST_THROUGH])}" if through else ""
    more = f" and {len(through) - MOST_THROUGH} more" if len(through) > MOST_THROUGH else ""
    return f"because {' and '.join(words)}{way}{more}"


def _alike(sources: Sequence[Source]) -> dict[tuple[int, ...], list[str]]:
    """The inputs by the lengths or numbers that they were fed."""
    numbers = dict[str, list[int]]()
    for source in sources:
        numbers.setdefault(source.name, []).append(source.size)
    found = dict[tuple[int, ...], list[str]]()
    for name, fed in numbers.items():
        found.setdefault(tuple(dict.fromkeys(fed)), []).append(name)
    return found
