"""The keys of a policy: one table, which reading, `kvdoctor config` and docs/policy.md are made from.

A key has the name of the option of the command line, if there is one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvdoctor.choices import CONSUMERS, FAIL_ON, REQUIRED, why_no_use
from kvdoctor.errors import UsageError
from kvdoctor.findings import why_no_check
from kvdoctor.targets import parse_targets
from kvdoctor.tolerances import why_not


@dataclass(frozen=True, slots=True)
class Key:
    """A key: the words for what it takes, its default, what it means, an example, and how a value is refused.

    `refuse` gives the reason why a value is none, an empty one where it is of another kind, or None. `parameter` is the
    option's name inside the command line. What is not `by_model` is said once for the whole gate, and in no override.
    """

    name: str
    takes: str
    default: Any
    means: str
    example: str
    refuse: Callable[[Any], str | None]
    parameter: str
    by_model: bool = True


def _kind(test: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """For values that are right or of another kind: what the key takes is said by the frame."""
    return lambda value: None if test(value) else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_switch(value: Any) -> bool:
    return type(value) is bool


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _codes(value: Any) -> str | None:
    if not _is_texts(value):
        return ""
    return why_no_check(value)


def _uses(value: Any) -> str | None:
    if not _is_texts(value):
        return ""
    reason = why_no_use(value)
    return None if reason is None else f"it {reason}"


def _targets(value: Any) -> str | None:
    if not _is_texts(value):
        return ""
    try:
        parse_targets(tuple(value))
    except UsageError as error:
        return str(error).removeprefix("--target ")
    return None


def _tolerances(value: Any) -> str | None:
    if not isinstance(value, dict):
        return ""
    return next((reason for item in value.items() if (reason := why_not(*item)) is not None), None)


KEYS = (
    Key(
        "models",
        "a list of patterns",
        [],
        "the models that are checked where none is named",
        'models = ["exports/*"]',
        _kind(_is_texts),
        "paths",
        by_model=False,
    ),
    Key(
        "baseline",
        "the path of a file",
        None,
        "the findings that are known; relative to the policy's folder (docs/baseline.md)",
        'baseline = "kvdoctor-baseline.json"',
        _kind(_is_text),
        "baseline",
        by_model=False,
    ),
    Key(
        "jobs",
        "a whole number, 1 or more",
        None,
        "how many models are run side by side",
        "jobs = 2",
        _kind(lambda value: _is_whole(value, 1)),
        "jobs",
        by_model=False,
    ),
    Key(
        "cache",
        "true or false",
        True,
        "whether a model that has not changed is skipped",
        "cache = false",
        _kind(_is_switch),
        "cache",
        by_model=False,
    ),
    Key(
        "consumer",
        '"plain" or "held"',
        "plain",
        "the loop that will call the model: every present fed back, or the cross-attention cache held",
        'consumer = "held"',
        _kind(lambda value: value in CONSUMERS),
        "consumer",
    ),
    Key(
        "targets",
        "a list of runtimes",
        [],
        "the runtimes that the model must live in (docs/targets.md)",
        'targets = ["onnxruntime==1.16.3"]',
        _targets,
        "targets",
    ),
    Key(
        "select",
        "a list of codes, prefixes or names",
        [],
        "only these checks; an empty list means all of them",
        'select = ["KV2", "KV3"]',
        _codes,
        "select",
    ),
    Key(
        "ignore",
        "a list of codes, prefixes or names",
        [],
        "not these checks",
        'ignore = ["names-mislead"]',
        _codes,
        "ignore",
    ),
    Key(
        "fail-on",
        '"note", "warning", "error" or "never"',
        "error",
        "the lowest severity that makes the exit code 1",
        'fail-on = "warning"',
        _kind(lambda value: value in FAIL_ON),
        "fail_on",
    ),
    Key(
        "require",
        "a list of uses",
        [],
        f"uses that must work: {', '.join(REQUIRED)}",
        'require = ["batch", "beam"]',
        _uses,
        "require",
    ),
    Key(
        "tolerances",
        "a table of arithmetics and shares of the logits' spread",
        {},
        "how far logits may lie apart and pass, where kvdoctor's own limit does not fit",
        "tolerances = { float16 = 0.03 }",
        _tolerances,
        "tolerances",
    ),
    Key(
        "thorough",
        "true or false",
        False,
        "also what takes long: the full context, a sweep of lengths, other ways to run the file",
        "thorough = true",
        _kind(_is_switch),
        "thorough",
    ),
    Key(
        "provider",
        "the name of an execution provider",
        "CPUExecutionProvider",
        "the execution provider",
        'provider = "CUDAExecutionProvider"',
        _kind(_is_text),
        "provider",
    ),
    Key(
        "seed",
        "a whole number, 0 or more",
        0,
        "the seed of all inputs that are made up",
        "seed = 7",
        _kind(lambda value: _is_whole(value, 0)),
        "seed",
    ),
    Key(
        "timeout",
        "a number of seconds above 0",
        300.0,
        "the longest time for one answer of the runtime",
        "timeout = 60",
        _kind(_is_seconds),
        "timeout",
    ),
    Key(
        "max-memory",
        "a whole number of MiB, 1 or more",
        None,
        "the most resident memory of the runtime's process; without it nine tenths of the machine's",
        "max-memory = 4096",
        _kind(lambda value: _is_whole(value, 1)),
        "max_memory",
    ),
    Key(
        "hash",
        "true or false",
        False,
        "put the SHA-256 of each file into the report",
        "hash = true",
        _kind(_is_switch),
        "hash_files",
    ),
    Key(
        "offline",
        "true or false",
        False,
        "never use the network",
        "offline = true",
        _kind(_is_switch),
        "offline",
    ),
)
BY_NAME = {key.name: key for key in KEYS}
OVERRIDES = "overrides"
