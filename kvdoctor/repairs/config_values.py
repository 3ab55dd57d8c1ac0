"""Corrects the numbers and names in a config that the graph contradicts.

Requires: a key of config.json or genai_config.json whose right value the graph shows beyond doubt.
Ensures: those keys, and no others, have the values of the graph. What can be right in two ways is left, and said.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvdoctor.case import Case
from kvdoctor.checks.side_cars.config_json import config_json
from kvdoctor.checks.side_cars.disagreement import Disagreement
from kvdoctor.checks.side_cars.genai_config import genai_config
from kvdoctor.configs import DECODER_PARTS
from kvdoctor.repairs import Change, Patient, Repair

COMPARED: dict[str, Callable[[Case], list[Disagreement]]] = {
    "config.json": config_json,
    "genai_config.json": genai_config,
}


NO_WINDOW = "no window"
"""What the comparison says is right where the graph has no window at all."""


def apply(patient: Patient) -> tuple[Change, ...]:
    """Correct every config that the findings name."""
    case = Case(patient.copy.folder, patient.options.consumer, stack=patient.stack, contract=patient.drivable)
    changes: list[Change] = []
    for finding in patient.found("config-disagrees"):
        name = finding.file or ""
        content = patient.copy.side_car(name)
        if name not in COMPARED or not isinstance(content, dict):
            patient.cannot(f"{name} describes how the graph was traced, which only its exporter knows", "export again")
        changes += _corrected(name, content, COMPARED[name](case))
    if not changes:
        patient.cannot("the graph does not show what the config must say", "correct it by hand, or export again")
    return tuple(changes)


def _corrected(name: str, content: dict[str, Any], found: list[Disagreement]) -> Iterator[Change]:
    for one in found:
        holder, key = _holder(name, content, one.key)
        if one.right == NO_WINDOW:
            yield from _without(name, *_holder(name, content, one.key.rpartition(".")[0]), one)
            continue
        value = _value(one.right)
        if holder is None or value is None or key not in holder or holder[key] == value:
            continue
        before = holder[key]
        holder[key] = value
        yield Change(name, one.key, json.dumps(before), f"{json.dumps(value)}, since the graph shows {one.observed}")


def _without(name: str, holder: dict[str, Any] | None, key: str, one: Disagreement) -> Iterator[Change]:
    """Take a whole entry out of a config."""
    if holder is not None and key in holder:
        yield Change(name, one.key, json.dumps(holder.pop(key)), f"nothing, since the graph shows {one.observed}")


def _holder(name: str, content: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    """The object in which a key stands: by its path, or the part of config.json that speaks of the decoder."""
    *parts, key = path.split(".")
    if name == "config.json":
        parts = [part for part in DECODER_PARTS if isinstance(content.get(part), dict)][:1]
    holder: Any = content
    for part in parts:
        holder = holder.get(part) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) else None), key


def _value(right: str) -> int | bool | str | None:
    """A right value as JSON has it; None where it is put in words, or may be one of several."""
    if match := re.fullmatch(r"(\d+)( at most)?", right):
        return int(match[1])
    if right in ("true", "false"):
        return right == "true"
    if right.startswith('"'):
        try:
            text = json.loads(right)
        except ValueError:
            return None
        return text if isinstance(text, str) else None
    return None


REPAIR = Repair(
    name="config-values",
    mends=("config-disagrees",),
    stage="side-cars",
    keeps="bits",
    apply=apply,
    advice=("Take names and sizes from the graph (`kvdoctor contract MODEL`), not from the config.",),
)
