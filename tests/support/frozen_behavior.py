"""Writes what every command says of every model at hand, and compares two such recordings.

A refactoring must leave the recording equal, byte for byte; a change of wording must leave it equal with `--structure`,
which leaves out all prose.

    python tests/support/frozen_behavior.py write FOLDER [--quick] [--exports FOLDER_OF_EXPORTS] [--match TEXT]
    python tests/support/frozen_behavior.py compare BEFORE AFTER [--structure]

`--quick` leaves out what runs a model. Times, sizes of memory and versions are masked.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = str(ROOT)

STATIC = (("inspect",), ("contract",))
RUNNING = (("step-test",), ("re-export", "-o", "OUT"), ("gate",))
MASKED = {"measured", "environment", "tool", "seconds", "speed", "peak_bytes"}
PROSE = {
    *("where", "cause", "declared", "observed", "evidence", "effects", "text", "reason", "because", "notes", "note"),
    *("obstacle", "missing", "what", "why", "said", "words", "unknown", "explained"),
    *("claim", "detail", "summary", "advice", "instead", "before", "after", "undo", "provenance", "no_location"),
}
"""Keys whose values are sentences."""


def models(exports: Path | None) -> dict[str, Path | None]:
    """Every model by name; text fixtures have no folder until they are written."""
    from support.text_fixtures import load_all

    found: dict[str, Path | None] = {f"text/{name}": None for name in load_all()}
    found |= {f"exports/{p.name}": p for p in sorted((ROOT / "fixtures/exports").iterdir()) if p.is_dir()}
    found |= {f"scratch/{p.stem}": p for p in sorted((ROOT / "fixtures/from_scratch").glob("*.onnx"))}
    if exports is not None:
        found |= {f"zoo/{p.name}": p for p in sorted(exports.iterdir()) if p.is_dir()}
    return found


def record(asked: tuple[str, Path | None, Path, bool]) -> str:
    """Write what the commands say of one model as one JSON document."""
    name, source, out, quick = asked
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        options: list[str] = []
        if source is None:
            from support.text_fixtures import load_all

            fixture = load_all()[name.removeprefix("text/")]
            fixture.write(Path("model"))
            options += ["--thorough"] if fixture.thorough else []
            options += [each for target in fixture.targets for each in ("--target", target)]
            options += ["--offline"] if fixture.targets else []
        elif source.is_dir():
            shutil.copytree(source, "model")
        else:
            Path("model").mkdir()
            shutil.copy(source, "model")
        for command in (*STATIC, *(() if quick else RUNNING)):
            more = [] if command[0] in ("inspect", "contract") else options
            said[command[0]] = run([*command, *more])
            if command[0] == "re-export" and Path("OUT").exists():
                said["re-export"]["files"] = digests(Path("OUT"))
                shutil.rmtree("OUT")
        os.chdir(ROOT)
    file = out / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(said, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return name


def run(arguments: list[str]) -> dict[str, Any]:
    """Run the command line in a forked process, and give its exit code and its JSON document."""
    printed = Path("printed.json")
    child = os.fork()
    if child == 0:
        # A file and no pipe: standard output of this process may be a file, and its wrapper remembers that.
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.argv = ["kvdoctor", arguments[0], "model", *arguments[1:], "--format", "json"]
        from kvdoctor.cli.main import main

        code: Any = 70
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:  # a crash is part of what is recorded
            code = 71
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = printed.read_text(encoding="utf-8")
    try:
        document = masked(json.loads(text))
    except ValueError:
        document = text
    return {"exit": code, "document": document}


def masked(value: Any) -> Any:
    """The value without what differs between two runs of the same code."""
    if isinstance(value, dict):
        return {key: "..." if key in MASKED else masked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [masked(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"\b\d+(\.\d+)? ?(ms|s|times|MiB)\b", "N \\2", re.sub(r"/tmp/[^\s'\"]+", "TMP", value))  # noqa: S108 - a pattern
    return value


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file; reports only by their names."""
    return {
        str(p.relative_to(folder)): "report" if "report" in p.name else hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def structure(value: Any, key: str = "") -> Any:
    """The value without its prose."""
    if isinstance(value, dict):
        return {name: structure(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return f"{len(value)} texts" if key in PROSE else [structure(each, key) for each in value]
    return "prose" if isinstance(value, str) and key in PROSE else value


def compare(before: Path, after: Path, *, only_structure: bool) -> int:
    """Print where two recordings differ; gives how many models do."""
    names = sorted({str(p.relative_to(d)) for d in (before, after) for p in d.rglob("*.json")})
    differing = 0
    for name in names:
        if not (before / name).exists() or not (after / name).exists():
            print(f"only in one: {name}")
            continue
        left, right = (json.loads((d / name).read_text(encoding="utf-8")) for d in (before, after))
        if only_structure:
            left, right = structure(left), structure(right)
        found = list(differences(left, right, ""))
        differing += bool(found)
        for line in found[:6]:
            print(f"{name}: {line}")
    print(f"{len(names)} models, {differing} differ")
    return differing


def differences(left: Any, right: Any, place: str) -> Any:
    """Where two documents differ, a line each."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            yield from differences(left.get(key), right.get(key), f"{place}/{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for at, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(one, other, f"{place}/{at}")
    elif left != right:
        yield f"{place}: {json.dumps(left)[:200]} -> {json.dumps(right)[:200]}"


def load_everything() -> None:
    """Import what the commands import, so that the forked processes need not; ONNX Runtime stays with the worker."""
    import kvdoctor

    sys.modules["onnxruntime"] = None  # type: ignore[assignment]
    for module in pkgutil.walk_packages(kvdoctor.__path__, "kvdoctor."):
        if "scripts" not in module.name and not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    del sys.modules["onnxruntime"]


def main() -> None:
    """Parse and call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    write = commands.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("--quick", action="store_true")
    write.add_argument("--exports", type=Path)
    write.add_argument("--match", default="")
    write.add_argument("--processes", type=int, default=2)
    against = commands.add_parser("compare")
    against.add_argument("before", type=Path)
    against.add_argument("after", type=Path)
    against.add_argument("--structure", action="store_true")
    given = parser.parse_args()
    if given.command == "compare":
        sys.exit(bool(compare(given.before, given.after, only_structure=given.structure)))
    load_everything()

    out = given.folder.resolve()
    wanted = [(n, p, out, given.quick) for n, p in models(given.exports).items() if given.match in n]
    begin = time.monotonic()
    with multiprocessing.get_context("fork").Pool(given.processes) as pool:
        for number, _ in enumerate(pool.imap_unordered(record, wanted, chunksize=1), 1):
            if number % 50 == 0:
                print(f"{number} of {len(wanted)}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(wanted)} models: {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
