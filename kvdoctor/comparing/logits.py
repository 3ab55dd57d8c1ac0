"""The logits of two stacks on the same feeds, step by step.

Feeds are made up from one seed by the contract: they are the same where the vocabularies are, and where both make their
encoder states in the same way. Of each side the loop that went farthest is taken, up to where the other ended.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import CacheContract
from kvdoctor.cure.proof import LOOPS, Side
from kvdoctor.parity import Verdict, judge
from kvdoctor.parity import compare as measure
from kvdoctor.report.diff_document import Logits, Numbers
from kvdoctor.tolerances import TOLERANCES
from kvdoctor.trace import Run

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LENGTHS = ("batch", "new", "past", "total")
LEVELS: tuple[Numbers, ...] = ("other", "tokens", "logits", "bits")


@dataclass(frozen=True)
class _Given:
    """The logits of one step, float[batch, new, vocabulary], and the position behind its last token."""

    end: int
    logits: "Array"


class CannotCompare(Exception):
    """The logits of the two cannot be held against one another. The message says why."""


def logits_of_both(a: Side, b: Side, stack_a: str, stack_b: str) -> tuple[Logits, Verdict]:
    """How far the logits of a stack of B agree with those of a stack of A, and how the difference is judged.

    Raises:
        CannotCompare: they take other feeds, or one of them gave no logits.
    """
    old, new = _contract(a, stack_a), _contract(b, stack_b)
    _refuse_other_feeds(old, new)
    (name, first), (_, second) = _loop(a, stack_a, old), _loop(b, stack_b, new)
    pairs = [_same_positions(x, y) for x, y in zip(first, second, strict=False)]
    width = pairs[0][0].shape[-1]
    rows = [[part.reshape(1, -1, width) for part in side] for side in zip(*pairs, strict=True)]
    import numpy as np

    expected, actual = (np.concatenate(parts, axis=1) for parts in rows)
    exactness = max(old.exactness, new.exactness, key=lambda kind: TOLERANCES[kind].passes)
    found = measure(actual, expected, exactness)
    same = found.same_top1 + found.near_ties
    verdict = judge(found, exactness)
    agree: Numbers = "tokens" if found.finite and same >= 1 else "other"
    agree = "logits" if verdict == "pass" else agree
    agree = "bits" if bool(np.array_equal(expected, actual, equal_nan=True)) else agree
    relative = found.relative if found.finite else None
    return Logits(name, len(pairs), agree, exactness, relative, round(same, 4)), verdict


def is_less(found: Numbers, asked: Numbers) -> bool:
    """Whether logits agree less than was asked for."""
    return LEVELS.index(found) < LEVELS.index(asked)


def _contract(side: Side, stack: str) -> CacheContract:
    contract = side.contract(stack)
    if contract is None:
        raise CannotCompare(f"no cache contract was read of {stack}")
    return contract


def _refuse_other_feeds(a: CacheContract, b: CacheContract) -> None:
    if a.vocabulary != b.vocabulary:
        words = [f"{contract.vocabulary or 'an unknown number of'} words" for contract in (a, b)]
        raise CannotCompare(f"they take other tokens: {words[0]} against {words[1]}")
    if ("encode" in a.phases) != ("encode" in b.phases):
        raise CannotCompare("one of them has an encoder file, and the other is fed made-up encoder states")
    if a.codebooks != b.codebooks:
        raise CannotCompare(f"they take {a.codebooks} and {b.codebooks} rows of tokens for a sequence")
    for role in ("token_ids", "token_and_position", "embeddings", "encoder_input", "encoder_states"):
        if _widths(a, role) != _widths(b, role):
            raise CannotCompare(f"their inputs with the role {role} are not of the same widths")


def _widths(contract: CacheContract, role: str) -> set[object]:
    """Rank and numbers of the inputs of a role, which are all that made-up feeds depend on besides lengths."""
    found: set[object] = set()
    for graph in contract.graphs.values():
        for port in graph.inputs:
            if port.role == role:
                sizes = (size for axis, size in zip(port.axes, port.shape or (), strict=False) if axis not in LENGTHS)
                found.add((len(port.axes), *(size for size in sizes if isinstance(size, int))))
    return found


def _loop(side: Side, stack: str, contract: CacheContract) -> "tuple[str, list[_Given]]":
    """The loop with the most steps, the held one rather than the plain one: its name, and what its steps gave."""
    best: tuple[str, list[_Given]] = ("", [])
    for name in reversed(LOOPS):
        run, kept = side.run(stack, name), side.kept(stack, name)
        if run is not None and kept is not None:
            steps = _steps(run, kept, contract)
            best = (name, steps) if len(steps) > len(best[1]) else best
    if not best[1]:
        raise CannotCompare(f"no loop of {side.report.model.path} ({stack}) gave logits")
    return best


def _steps(run: Run, kept: "Array", contract: CacheContract) -> "list[_Given]":
    """What each step gave, out of the logits of all in a row."""
    found, at = [], 0
    for step in run.steps:
        port = contract.graph("prefill" if step.phase == "prefill" else "decode").port("logits")
        seen = step.returned.get(port.name) if port is not None else None
        if seen is None or at + math.prod(seen.shape) > kept.size:
            break
        logits = kept[at : at + math.prod(seen.shape)].reshape(seen.shape)
        found.append(_Given(step.past_length + step.new_tokens, logits))
        at += math.prod(seen.shape)
    return found


def _same_positions(a: "_Given", b: "_Given") -> "tuple[Array, Array]":
    """The logits of the last positions of a step that both gave.

    Raises:
        CannotCompare: there are none: the steps end at other positions, or the shapes do not fit.
    """
    old, new = a.logits, b.logits
    if a.end != b.end:
        raise CannotCompare("their loops take the tokens in other steps")
    if old.ndim != 3 or new.ndim != 3 or (old.shape[0], old.shape[2]) != (new.shape[0], new.shape[2]):
        raise CannotCompare(f"their logits have the shapes {list(old.shape)} and {list(new.shape)}")
    count = min(old.shape[1], new.shape[1])
    return old[:, old.shape[1] - count :], new[:, new.shape[1] - count :]
