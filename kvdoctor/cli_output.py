"""Where results go: standard output, and the files asked for with `--output`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdoctor.report.formats import FORMATS

if TYPE_CHECKING:
    from kvdoctor.gating import Judged
    from kvdoctor.report.document import Report

NEVER_OVERWRITTEN = {".onnx", ".ort", ".data", ".safetensors", ".toml", ".npz"}
INPUTS = ("path", "paths", "a", "b", "contract", "inputs", "trace", "baseline", "because", "from_", "reference")
"""Parameters of all commands that name what is read."""
HEAD = 4096


def outputs(
    given: dict[str, Any], formats: tuple[str, ...] = FORMATS, models: Sequence[str] = ()
) -> list[tuple[str, Path]]:
    """The files asked for with `--output`: (format, file), refused before any work is done.

    A command may have other `formats`. `models` are paths that are read and that the command line does not name.

    Raises:
        UsageError: one of them cannot be written, or would be written twice.
    """
    asked: list[tuple[str, Path]] = []
    for target in given["outputs"]:
        name, _, file = target.partition("=")
        if name not in formats or not file:
            raise click.UsageError(f"--output takes FORMAT=FILE with a format of {', '.join(formats)}; got {target!r}")
        path = Path(file)
        problem = _refused(file, path, [one for _, one in asked]) or _would_destroy(file, path, models)
        if problem:
            raise click.UsageError(f"--output {name}: {problem}")
        asked.append((name, path))
    return asked


def _refused(file: str, path: Path, others: list[Path]) -> str | None:
    """Why a file cannot be written, as far as that is known beforehand."""
    if file == "-":
        return "standard output is what --format fills; give a FILE"
    if path.is_dir():
        return f"{file!r} is a folder; give a file in it"
    if not path.parent.is_dir():
        return f"the folder of {file!r} does not exist; make it first"
    if any(os.path.realpath(path) == os.path.realpath(other) for other in others) and not path.is_char_device():
        return f"{file!r} is given twice; give each format a file of its own"
    if path.suffix.lower() in NEVER_OVERWRITTEN:
        return f"{file!r} has the name of a model or its weights, which are never written to"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{file!r} is not writable"
    return None


def _would_destroy(file: str, path: Path, models: Sequence[str]) -> str | None:
    """Why a file that is there is not ours to replace: it is read by this command, or lies in a model's folder."""
    if not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as opened:
        head = opened.read(HEAD)
    if b'"kvdoctor/baseline/' in head:
        return f"{file!r} is a baseline; give another file"
    ours = b"kvdoctor" in head or path.suffix == ".log"
    context = click.get_current_context(silent=True)
    said = [context.params.get(name) for name in INPUTS] if context is not None else []
    named = [one for value in said for one in (value if isinstance(value, tuple) else (value,)) if one]
    here = Path(os.path.realpath(path))
    for one in (*named, *models):
        place = Path(os.path.realpath(one))
        folder = place if place.is_dir() else place.parent
        if here == place or (here.is_relative_to(folder) and not ours and _is_model(place)):
            return f"{file!r} is there already, and is read or lies beside what is read; give another file"
    return None


def _is_model(place: Path) -> bool:
    return place.is_dir() or place.suffix.lower() in NEVER_OVERWRITTEN


def show(report: "Report", given: dict[str, Any], **more: Any) -> None:
    """Print a report in the format asked for, and write the files asked for.

    Raises:
        UsageError: a file cannot be written; what goes to standard output was printed all the same.
    """
    from kvdoctor.report import formats

    texts = [(file, formats.rendered(report, name)) for name, file in outputs(given)]
    if given["format_"] == "text":
        from kvdoctor.report import text

        text.render(report, formats.console(given["color"]), verbosity(given), **more)
    else:
        sys.stdout.write(formats.rendered(report, given["format_"]))
    sys.stdout.flush()
    write(texts)


def show_gate(done: "Judged", given: dict[str, Any]) -> None:
    """The same for the reports of a gate.

    In a GitHub workflow, annotations and a summary come with the text. Where standard output holds a document, what is
    to be told of the baseline goes to standard error.

    Raises:
        UsageError: a file or the summary cannot be written; what goes to standard output was printed all the same.
    """
    from kvdoctor.report import formats
    from kvdoctor.report.safe import printable

    reports, document, last = list(done.reports), done.to_dict, done.last_lines()
    texts = [(file, formats.rendered_gate(document, reports, last, name)) for name, file in outputs(given)]
    in_workflow = os.environ.get("GITHUB_ACTIONS") == "true"
    if given["format_"] == "text":
        from kvdoctor.report import text

        text.render_gate(reports, last, formats.console(given["color"]), verbosity(given))
        if in_workflow:
            sys.stdout.write(formats.rendered_gate(document, reports, last, "github"))
    else:
        sys.stdout.write(formats.rendered_gate(document, reports, last, given["format_"]))
        for line in done.baseline.lines() if done.baseline is not None else ():
            click.echo(f"kvdoctor: baseline {printable(line)}", err=True)
    sys.stdout.flush()
    write(texts)
    if in_workflow:
        from kvdoctor.report import step_summary

        if not step_summary.write(done.verdict, reports, last):
            click.echo("kvdoctor: the summary of this step has no room for the report of the gate", err=True)


def write(texts: list[tuple[Path, str]]) -> None:
    """Write the files asked for, each whole or not at all.

    Raises:
        UsageError: one cannot be written.
    """
    from kvdoctor.out_folder import write_whole

    for file, content in texts:
        write_whole(file, content)


def verbosity(given: dict[str, Any]) -> int:
    """-1 with `--quiet`, 1 with `--verbose`, else 0."""
    return -1 if given["quiet"] else 1 if given["verbose"] else 0
