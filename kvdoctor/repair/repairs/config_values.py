"""The repair of configs next to the model."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvdoctor.analysis.configs import DECODER_PARTS
from kvdoctor.diagnose.checks.side_cars.config_json import config_json
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement
from kvdoctor.diagnose.checks.side_cars.genai_config import genai_config
from kvdoctor.diagnose.checks.side_cars.tokenizer import END, generation_stops
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext

COMPARED: dict[str, Callable[[ContractContext], list[Disagreement]]] = {
    "config.json": config_json,
    "genai_config.json": genai_config,
    "generation_config.json": generation_stops,
}

NO_WINDOW = "no window"
"""The right value that the comparison gives if the graph has no window."""


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Corrects values in a config that the graph contradicts.

    Requires: a key of config.json or genai_config.json whose right value the graph shows beyond doubt, or an end token
    of generation_config.json or genai_config.json that the tokenizer names.
    Ensures: those keys, and no others, have the values of the graph; end tokens are added. Keys with several possible
    values are left and reported.
    """
    checked = ContractContext(folder=context.copy.folder, stack=context.stack, contract=context.drivable)
    changes: list[Change] = []
    for finding in context.found("config-disagrees"):
        name = finding.file or ""
        content = context.copy.side_car(name)
        if name not in COMPARED or not isinstance(content, dict):
            context.cannot(f"{name} describes how the graph was traced, which the graph does not show", "export again")
        changes += _correct_keys(name, content, COMPARED[name](checked))
    if not changes:
        context.cannot("the graph does not show the right value", "correct the config by hand, or export again")
    return tuple(changes)


def _correct_keys(name: str, content: dict[str, Any], found: list[Disagreement]) -> Iterator[Change]:
    for one in found:
        if one.right == NO_WINDOW:
            holder, key = _find_holder(name, content, one.key.rpartition(".")[0])
            if holder is not None and key in holder:
                now = f"removed, since the graph shows {one.observed}"
                yield Change(name, one.key, json.dumps(holder.pop(key)), now)
            continue
        holder, key = _find_holder(name, content, one.key)
        value = _parse_value(one.right)
        if holder is None or value is None or (key not in holder and key != END) or holder.get(key) == value:
            continue
        before = json.dumps(holder[key]) if key in holder else "left out"
        holder[key] = value
        says = "shows" if one.against == "the graph" else "has"
        yield Change(name, one.key, before, f"{json.dumps(value)}, since {one.against} {says} {one.observed}")


def _find_holder(name: str, content: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    """The object that holds a key: by its path, or the part of config.json for the decoder."""
    *parts, key = path.split(".")
    if name == "config.json":
        parts = [part for part in DECODER_PARTS if isinstance(content.get(part), dict)][:1]
    holder: Any = content
    for part in parts:
        holder = holder.get(part) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) else None), key


def _parse_value(right: str) -> int | bool | str | list[int] | None:
    """A right value as JSON; None if it is described as text or may be one of several."""
    if match := re.fullmatch(r"(\d+)( at most)?", right):
        return int(match[1])
    if re.fullmatch(r"\[\d+(, \d+)*\]", right):
        return [int(number) for number in re.findall(r"\d+", right)]
    if right in ("true", "false"):
        return right == "true"
    with contextlib.suppress(ValueError):
        text = json.loads(right) if right.startswith('"') else None
        return text if isinstance(text, str) else None
    return None


ADVICE = ("Take names and sizes from the graph (`kvdoctor contract MODEL`), not from the config.",)
REPAIRS = (Repair("config-values", ("config-disagrees",), "side-cars", "bits", apply, ADVICE),)
