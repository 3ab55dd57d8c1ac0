"""Damages the files of a model at random: bytes of a file, and the values of a side-car."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

SIDE_CARS = ("config", "generation_config", "genai_config", "tokenizer", "tokenizer_config", "quantize_config")
VALUES: tuple[Any, ...] = (None, [], {}, "", -1, 0, 1 << 70, 1e308, 0.5, [[1]], True)
VALUES += ({"a": {"b": []}}, "\0\x1b", "a" * 5000, [None] * 99)
DEEP = ("[" * 5000 + "]" * 5000, '{"a":' * 900 + "1" + "}" * 900)
TEXT_VALUES = ("NaN", "-Infinity", "1e999", *DEEP, "9" * 5000, '"\\ud800"')
"""What a JSON file may hold that Python writes not, or reads in a way of its own."""


def damage_bytes(content: bytearray, random: Random, how: str) -> None:
    """Cut a file, flip some bits, or make some of its texts no UTF-8."""
    if how == "cut" and content:
        del content[random.randrange(len(content)) :]
        return
    texts = list(re.finditer(rb"[\w./]{4,}", content)) if how == "not UTF-8" else []
    for _ in range(random.choice((1, 2, 8))):
        if texts:
            first, end = random.choice(texts).span()
            content[first:end] = (b"\xff\xc0\xed\xa0\x80" * (end - first))[: end - first]
        else:
            content[random.randrange(len(content) or 1)] ^= 1 << random.randrange(8)


def damage_side_car(folder: Path, random: Random) -> None:
    """Another value for an entry of a JSON file, at any depth; a file that was not there; or not all of its bytes."""
    there = [path for path in sorted(folder.rglob("*.json")) if path.is_file()]
    new = folder / f"{random.choice(SIDE_CARS)}.json"
    file = random.choice(there) if there and random.random() < 0.8 else new
    try:
        document: Any = json.loads(file.read_text("utf-8")) if file.exists() else {"model_type": "gpt2", "model": {}}
        inner = document
        while True:
            key = random.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            if not isinstance(inner[key], dict | list) or not inner[key] or random.random() < 0.3:
                break
            inner = inner[key]
        inner[key] = random.choice((*VALUES, "@" * 9))
        text = json.dumps(document).replace(f'"{"@" * 9}"', random.choice(TEXT_VALUES))
        file.write_text(text[: random.randrange(len(text))] if random.random() < 0.1 else text, "utf-8")
    except (ValueError, LookupError, RecursionError):
        file.write_text(random.choice(TEXT_VALUES), "utf-8")
