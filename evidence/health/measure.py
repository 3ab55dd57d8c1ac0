"""Measures the health page: makes the exports, runs the real command line on each, stores what it says.

    python -m evidence.health.measure --exports DIR [--release 1.22.1 ...] [--only TEXT] [--again]

DIR keeps the exports; those that lie there are not made again. The results go to evidence/health/results.json after
every export, so that a call that was cut short goes on where it stopped: a cell of the same files, the same kvdoctor
and the same runtime is not run again. What is different from the results before is added to its `changes`, with the
day. The pages are made from it by `python -m evidence.health.make_page`.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnxruntime

from evidence.health.cells import measure
from evidence.health.exports import Export, exports, make_missing, sources
from kvdoctor._version import __version__

STORE = Path(__file__).resolve().with_name("results.json")
RELEASES = ("1.22.1", "1.16.3")
"""Older runtimes that each export is tried in, beside the installed one."""


def load(store: Path) -> dict[str, Any]:
    """The stored results; none where nothing was stored yet."""
    if not store.exists():
        return {"schema": "kvdoctor/health/1", "made": "", "runtime": "", "releases": [], "exports": {}, "changes": []}
    document: dict[str, Any] = json.loads(store.read_text(encoding="utf-8"))
    return document


def save(document: dict[str, Any], store: Path) -> None:
    """Writes the results, whole or not at all."""
    unfinished = store.with_suffix(".tmp")
    unfinished.write_text(dump(document), encoding="utf-8")
    unfinished.replace(store)


def dump(document: dict[str, Any]) -> str:
    """The file's text: one line for each export and each change, so that two makings can be compared line by line."""
    parts = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines = [f"  {_line(name)}: {_line(entry)}" for name, entry in value.items()]
            body = "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            body = "[\n" + ",\n".join(f"  {_line(entry)}" for entry in value) + "\n ]"
        else:
            body = _line(value)
        parts.append(f" {_line(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def look(export: Export, stored: dict[str, Any], releases: list[str], again: bool) -> dict[str, Any] | None:
    """The results of one export; what is stored of the same files is kept. None where there is no export."""
    described = {"exporter": export.source.exporter, "beside": export.source.beside, "name": export.name}
    if not export.is_there():
        failure = export.failure()
        return None if failure is None else {**described, "not_exported": failure, "digest": "", "cells": {}}
    digest = export.digest()
    cells = dict(stored.get("cells", {})) if stored.get("digest") == digest else {}
    for release in releases:
        if again or cells.get(release, {}).get("kvdoctor") != __version__:
            target = None if release == onnxruntime.__version__ else release
            cells[release] = {"kvdoctor": __version__, **measure(export.path, target)}
    ordered = {release: cells[release] for release in sorted(cells, key=_order, reverse=True)}
    return {**described, "not_exported": None, "digest": digest, "cells": ordered}


def outcomes(entry: dict[str, Any]) -> dict[tuple[str, str], str]:
    """What an export is, for each runtime and stack, in words that two makings are compared by."""
    if entry["not_exported"] is not None:
        return {("", ""): "not exportable"}
    return {
        (release, stack): _words(facts)
        for release, cell in entry["cells"].items()
        for stack, facts in cell["stacks"].items()
    }


def changes(key: str, before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, str]]:
    """What is other than before; what was not measured before is new, not changed."""
    old, new = outcomes(before), outcomes(after)
    if (before["not_exported"] is None) != (after["not_exported"] is None):
        return [{"export": key, "runtime": "", "stack": "", "before": _exported(before), "after": _exported(after)}]
    return [
        {"export": key, "runtime": release, "stack": stack, "before": old[release, stack], "after": words}
        for (release, stack), words in new.items()
        if old.get((release, stack), words) != words
    ]


def _exported(entry: dict[str, Any]) -> str:
    return "exported" if entry["not_exported"] is None else "not exportable"


def _words(facts: dict[str, Any]) -> str:
    named = [*facts["errors"], *facts["warnings"]]
    by = f" by {', '.join(facts['repairs'])}" if facts["repairs"] else ""
    return facts["state"] + by + (f" ({', '.join(named)})" if named else "")


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def main() -> int:
    """Reads the command line, measures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exports", type=Path, required=True, metavar="DIR", help="where the exports are kept")
    parser.add_argument("--release", action="append", metavar="RELEASE", help=f"default: {', '.join(RELEASES)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="only exports with this text in their key")
    parser.add_argument("--again", action="store_true", help="run the cells again that have a result")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="exports that are diagnosed at a time")
    args = parser.parse_args()
    document = load(STORE)
    installed = onnxruntime.__version__
    releases = list(dict.fromkeys([installed, *(args.release or RELEASES)]))
    document["runtime"] = installed
    document["releases"] = sorted({*document["releases"], *releases}, key=_order, reverse=True)
    document["made"] = datetime.now(UTC).date().isoformat()
    problems = []
    pool = ThreadPoolExecutor(args.jobs)
    for source in sources():
        wanted = [export for export in exports(source, args.exports) if args.only in export.key]
        if wanted and (obstacle := make_missing(source, args.exports, tuple(each.name for each in wanted))) is not None:
            problems.append(f"{source.exporter}, {source.beside}: {obstacle}")
        olds = [document["exports"].get(export.key) for export in wanted]
        asked = [
            pool.submit(look, each, old or {}, releases, args.again) for each, old in zip(wanted, olds, strict=True)
        ]
        for export, before, answer in zip(wanted, olds, asked, strict=True):
            try:
                after = answer.result()
            except RuntimeError as problem:
                problems.append(str(problem))
                continue
            if after is None:
                problems.append(f"{export.key}: there is no export")
                continue
            document["exports"][export.key] = after
            found = changes(export.key, before, after) if before else []
            document["changes"] += [{"made": document["made"], **each} for each in found]
            save(document, STORE)
            print(export.key, sorted(set(outcomes(after).values())), flush=True)
    order = {export.key: None for source in sources() for export in exports(source, args.exports)}
    document["exports"] = {key: document["exports"][key] for key in order if key in document["exports"]}
    save(document, STORE)
    print("\n".join(problems), file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
