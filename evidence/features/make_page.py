"""Writes evidence/features.md from its table: `python -m evidence.features.make_page`.

`--run` runs every command of the table and looks for what it must show; nothing is written where one does not.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from evidence.features.table import FEATURES, Feature, Held, Shown, Tested

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "evidence" / "features.md"
MOST_SECONDS = 600
HEAD = """# What users ask for, and what kvdoctor does

{total} things that people ask of tools for decoders, in issues and in other tools' documentation: {counts}. Each *yes*
and *partly* has its evidence: a command and what it prints, a test of this repository, or a file. `TEXT/NAME` is the
text fixture `fixtures/text/NAME.onnxtxt`, compiled by `python tests/support/text_fixtures.py NAME FOLDER`;
`OUT` is a new folder.

Made by `python -m evidence.features.make_page` from `evidence/features/table.py`; `--run` runs every command first.
"""


def page() -> str:
    """The whole page."""
    counts = Counter(feature.answer for features in FEATURES.values() for feature in features)
    parts = [HEAD.format(total=counts.total(), counts=", ".join(f"{n} {answer}" for answer, n in counts.items()))]
    number = 0
    for group, features in FEATURES.items():
        parts.append(f"\n## {group}\n\n| | asked for | answer | evidence |\n| --- | --- | --- | --- |\n")
        for feature in features:
            number += 1
            parts.append(f"| {number} | {feature.words} | {_answer(feature)} | {_evidence(feature)} |\n")
    return "".join(parts)


def _answer(feature: Feature) -> str:
    return f"**{feature.answer}**" + (f": {feature.missing}" if feature.missing else "")


def _evidence(feature: Feature) -> str:
    return "<br>".join(_describe(each) for each in feature.evidence)


def _describe(each: Shown | Tested | Held) -> str:
    if isinstance(each, Tested):
        return f"test `{each.file}::{each.name}`"
    if isinstance(each, Held):
        return f"file `{each.file}`: `{each.text}`"
    shown = f": `{each.words()}`" if each.words() else ""
    code = f", exit code {each.code}" if each.code else ""
    return f"`kvdoctor {' '.join(_arguments(each))}`{shown}{code}".replace("|", "\\|")


def commands() -> Iterator[Shown]:
    """Every command of the table, once."""
    seen = set()
    for each in (each for features in FEATURES.values() for feature in features for each in feature.evidence):
        if isinstance(each, Shown) and each not in seen:
            seen.add(each)
            yield each


def problem_of(shown: Shown) -> str | None:
    """Runs a command. Returns what is wrong with its output, None where it shows what it must."""
    with tempfile.TemporaryDirectory(prefix="features-") as scratch:
        folder = Path(scratch)
        code, printed = _printed(_arguments(shown), folder)
        if code != shown.code:
            return f"exit code {code}, not {shown.code}: {printed[-400:]}"
        if shown.at:
            value = _value(json.loads(printed), shown.at)
            return None if value == shown.value else f"{shown.at} is {value!r}"
        if shown.file:
            written = folder / "OUT" / shown.file if shown.file != "." else folder / "OUT"
            if not written.is_file():
                return f"{shown.file} was not written"
            printed = written.read_text(encoding="utf-8")
        return None if shown.text in printed else f"it is not there: {printed[:600]}"


def _arguments(shown: Shown) -> tuple[str, ...]:
    more = ["--format", "json"] if shown.at else []
    return (*shlex.split(shown.command), *more)


def _printed(arguments: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """Exit code and standard output of a command; one that writes nothing is run once for all rows."""
    return _run(arguments, folder) if "OUT" in arguments else _run_once(arguments)


@cache
def _run_once(arguments: tuple[str, ...]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory(prefix="features-") as scratch:
        return _run(arguments, Path(scratch))


def _run(arguments: tuple[str, ...], folder: Path) -> tuple[int, str]:
    from support import text_fixtures

    line = []
    for argument in arguments:
        if found := re.match(r"TEXT/([\w-]+)", argument):
            written = folder / "TEXT" / found[1]
            if not written.exists():
                written.mkdir(parents=True)
                text_fixtures.read(text_fixtures.FOLDER / f"{found[1]}.onnxtxt").write(written)
        line.append(str(folder / argument) if found or argument == "OUT" else argument)
    done = subprocess.run(
        [sys.executable, "-m", "kvdoctor", *line],
        cwd=ROOT,
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=MOST_SECONDS,
    )
    return done.returncode, done.stdout if done.stdout.strip() else done.stderr


def _value(document: Any, at: str) -> Any:
    """The value at a path; `runs[NAME]` is the first run of an experiment."""
    for part in at.split("."):
        found = re.fullmatch(r"(\w+)\[([\w-]+)\]", part)
        if found:
            document = next(run for run in document[found[1]] if run["experiment"] == found[2])
        else:
            document = document[int(part)] if part.isdigit() else document[part]
    return document


def main() -> int:
    """Reads the command line, runs what was asked for, writes the page, and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run every command first")
    parser.add_argument("--only", default="", metavar="TEXT", help="with --run: only commands with this text")
    args = parser.parse_args()
    failed = False
    for shown in [each for each in commands() if args.run and args.only in each.command]:
        problem = problem_of(shown)
        failed = failed or problem is not None
        print("ok" if problem is None else "WRONG", f"kvdoctor {shown.command}", problem or "", flush=True)
    if not failed:
        PAGE.write_text(page(), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
