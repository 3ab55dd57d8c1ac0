"""Where results go: standard output, and the files of `--output`; and progress, on standard error.

Commands that end with a report share the call with the options given, and the options for a written copy.
"""

import errno
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor.cli.options import Command, GroupedOption, chosen_policy, given_options, given_paths
from kvdoctor.options import OUTPUT
from kvdoctor.records import record
from kvdoctor.report.formats import FORMATS, SUFFIXES

if TYPE_CHECKING:
    from kvdoctor.gating.verdict import GateResult
    from kvdoctor.report.document import Report


NEVER_OVERWRITTEN = {".onnx", ".ort", ".data", ".safetensors", ".toml", ".npz"}
HEAD_BYTES = 4096
CI_SECONDS = 30.0


@record
class Output:
    """What a command prints and writes: a format on standard output, and files as (format, file).

    `verbosity` is -1 with `--quiet`, the number of `-v`, else 0. `page` is the HTML file to open in a browser.
    """

    format: str
    files: tuple[tuple[str, Path], ...]
    verbosity: int
    color: str
    page: Path | None = None


def output_options(formats: tuple[str, ...] = FORMATS) -> Callable[[Command], Command]:
    """Add the options that say what is printed and written; `formats` are those of the command."""
    options = (
        format_option(formats),
        _option(
            "--output",
            "--report",
            "outputs",
            multiple=True,
            metavar="[FORMAT=]FILE",
            help="Also write this file; without FORMAT its suffix names the format, as in report.html.",
        ),
        _option("--open", "opens", is_flag=True, help="Open the written HTML page in a browser, unless CI is set."),
        quiet_option,
        _option("-v", "--verbose", count=True, help="Print the evidence; -vv prints every run, step and slot."),
        _option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            default="auto",
            help="Color; NO_COLOR and FORCE_COLOR are honored.",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _option(*words: str, **more: Any) -> Callable[[Command], Command]:
    return click.option(*words, cls=GroupedOption, group=OUTPUT, **more)


def format_option(formats: tuple[str, ...]) -> Callable[[Command], Command]:
    """Add the option for the format of standard output."""
    choice = click.Choice(formats)
    return _option(
        "--format", "format_", type=choice, default="text", help="Print this on standard output.", show_default=True
    )


def quiet_option(command: Command) -> Command:
    """Add `--quiet`."""
    return _option("-q", "--quiet", is_flag=True, help="Print the findings in short and the verdict.")(command)


def read_output(given: dict[str, Any], formats: tuple[str, ...] = FORMATS, models: Sequence[str] = ()) -> Output:
    """Read the options of `output_options`. Files that must not be written are refused before any work is done.

    `models` are paths that are read and that the command line does not name.

    Raises:
        UsageError: a file cannot be written, or would be written twice.
    """
    if given["quiet"] and given["verbose"]:
        raise click.UsageError("give --quiet or --verbose, not both")
    files: list[tuple[str, Path]] = []
    for target in given["outputs"]:
        name, file = _split_output(target, formats)
        path = Path(file)
        problem = _refused(file, path, [one for _, one in files]) or _would_destroy(file, path, models)
        if problem:
            raise click.UsageError(f"--output {name}: {problem}")
        files.append((name, path))
    page = next((path for name, path in files if name == "html"), None) if given["opens"] else None
    if given["opens"] and page is None:
        raise click.UsageError("--open opens a page that is written; give --output FILE.html as well")
    verbosity = -1 if given["quiet"] else given["verbose"]
    return Output(given["format_"], tuple(files), verbosity, given["color"], page)


def _split_output(target: str, formats: tuple[str, ...]) -> tuple[str, str]:
    """Split FORMAT=FILE; the suffix of a FILE alone names its format.

    Raises:
        UsageError: it has no format, or one that the command does not write.
    """
    name, equals, file = target.partition("=")
    if equals and file and name in formats:
        return name, file
    if (found := SUFFIXES.get(Path(target).suffix.lower())) in formats and (not equals or names_folder(name)):
        return str(found), target
    known = ", ".join(suffix for suffix, found in SUFFIXES.items() if found in formats)
    takes = f"FORMAT=FILE with a format of {', '.join(formats)}, or a FILE that ends in {known}"
    raise click.UsageError(f"--output takes {takes}; got {target!r}")


def names_folder(word: str) -> bool:
    """Whether a name contains a path separator: Windows takes both."""
    return os.sep in word or (os.altsep is not None and os.altsep in word)


def _refused(file: str, path: Path, others: list[Path]) -> str | None:
    """Return why a file cannot be written, where that is known before the work."""
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
    """Return why a file must not be replaced: this command reads it, or it lies in a model's folder."""
    if not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
    if b'"kvdoctor/baseline/' in head:
        return f"{file!r} is a baseline; give another file"
    ours = b"kvdoctor" in head or path.suffix == ".log"
    here = Path(os.path.realpath(path))
    for one in (*given_paths(), *models):
        place = Path(os.path.realpath(one))
        folder = place if place.is_dir() else place.parent
        is_model = place.is_dir() or place.suffix.lower() in NEVER_OVERWRITTEN
        if here == place or (here.is_relative_to(folder) and not ours and is_model):
            return f"{file!r} is there already, and is an input or next to one; give another file"
    return None


def show(output: Output, print_text: Callable[[Any, int], None], render: Callable[[str], str]) -> None:
    """Print a document, and write its files: `print_text` takes a console and the verbosity, `render` a format.

    Raises:
        UsageError: a file cannot be written; standard output is complete all the same.
    """
    with closed_pipe_allowed():
        if output.format == "text":
            from kvdoctor.report.console import open_console

            print_text(open_console(output.color), output.verbosity)
        else:
            print_document(render(output.format))
    write(output, render)


def show_gate(done: "GateResult", output: Output) -> None:
    """Print the reports of a gate, and write their files.

    In a GitHub workflow, annotations and a summary come with the text. Where standard output holds a document, the
    lines on the baseline go to standard error.

    Raises:
        UsageError: a file or the summary cannot be written; standard output is complete all the same.
    """
    from kvdoctor.report import formats
    from kvdoctor.report.escaping import printable

    reports, document, last = done.reports, done.outline, done.summary_lines()
    in_workflow = os.environ.get("GITHUB_ACTIONS") == "true"
    with closed_pipe_allowed():
        if output.format == "text":
            from kvdoctor.report import text

            text.print_gate(reports, last, text.open_console(output.color), output.verbosity)
            if in_workflow:
                print_document(formats.write_gate(document, reports, last, "github"))
        else:
            print_document(formats.write_gate(document, reports, last, output.format))
    if output.format != "text" and done.baseline is not None:
        for line in done.baseline.lines():
            click.echo(f"kvdoctor: baseline {printable(line)}", err=True)
    write(output, lambda name: formats.write_gate(document, reports, last, name))
    if in_workflow:
        from kvdoctor.report import github

        if not github.write_step_summary(done.verdict, reports, last):
            click.echo("kvdoctor: the report of the gate is too long for the summary of this step", err=True)


def print_document(text: str | Iterable[str]) -> None:
    """Print a document as it would be written to a file: as UTF-8, whatever the terminal takes, with its line breaks.

    On Windows, standard output that a file or another program gets is in the old encoding of the country.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    sys.stdout.writelines([text] if isinstance(text, str) else text)


def write(output: Output, render: Callable[[str], str | Iterable[str]]) -> None:
    """Write the files, each whole or not at all, say so, and open the page; `render` makes the text of a format.

    Raises:
        UsageError: one cannot be written.
    """
    from kvdoctor.model.output_folder import write_whole
    from kvdoctor.report.escaping import printable

    for name, file in output.files:
        write_whole(file, render(name))
        if output.verbosity >= 0:
            click.echo(printable(f"written: {file}"), err=True)
    if output.page is not None and not os.environ.get("CI"):
        import webbrowser

        webbrowser.open(output.page.absolute().as_uri())


class ProgressLine:
    """One line of a terminal that names the work in progress; called at the start of each experiment.

    `say` shows a text there, and `end` prints a line that stays.
    """

    def __init__(self, show: Callable[[str], None], end: Callable[[str], None] | None = None) -> None:
        self.say, self.end = show, end or complain

    def __call__(self, name: str, number: int, of: int) -> None:
        """Show an experiment: its name, its number, counted from 1, and how many there are."""
        self.say(f"experiment {number} of {of}: {name}")


@contextmanager
def progress_line(*, quiet: bool) -> Iterator[ProgressLine | None]:
    """Show progress on standard error; None with `--quiet`. Off a terminal only lines that stay are printed."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        with _regular_lines() if os.environ.get("CI") else nullcontext(ProgressLine(lambda _: None)) as line:
            yield line
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as line:
        end = partial(line.console.print, markup=False, highlight=False)
        yield ProgressLine(lambda text: line.update(escape(text)), end)


@contextmanager
def _regular_lines() -> Iterator[ProgressLine]:
    """Print the work in progress every half minute: CI services end a job that prints nothing for long."""
    latest, ended = ["starting"], threading.Event()

    def repeat() -> None:
        while not ended.wait(CI_SECONDS):
            complain(latest[0])

    def update(text: str) -> None:
        latest[0] = text

    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield ProgressLine(update)
    finally:
        ended.set()


def finish(report: "Report", output: Output) -> NoReturn:
    """Print a report, write its files, and end the process by its verdict."""
    from kvdoctor.report.document import exit_code
    from kvdoctor.report.formats import render

    def print_text(console: Any, verbosity: int) -> None:
        from kvdoctor.report.text import print_report

        print_report(report, console, verbosity)

    show(output, print_text, partial(render, report))
    end(exit_code(report, report.arguments["fail_on"]))


@contextmanager
def closed_pipe_allowed() -> Iterator[None]:
    """Go on where the reader of standard output has gone: the exit code tells the verdict, not that."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if not is_closed_pipe(error):
            raise
        discard_output()


def is_closed_pipe(error: OSError) -> bool:
    """Whether the reader of a pipe has gone: Windows calls that an invalid argument."""
    return isinstance(error, BrokenPipeError) or (os.name == "nt" and error.errno == errno.EINVAL)


def discard_output() -> None:
    """Let nothing more be written to standard output, also not when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def end(code: int) -> NoReturn:
    """End the process with an exit code."""
    with closed_pipe_allowed():
        sys.stdout.flush()
    raise SystemExit(code)


def complain(text: str) -> None:
    """Print a line on standard error, if there is somewhere to print it."""
    with suppress(OSError):
        click.echo(f"kvdoctor: {text}", err=True)


out_option = partial(click.option, cls=GroupedOption, group=OUTPUT)


def finish_with(call: Callable[..., Any], given: dict[str, Any], *paths: str | None, **own: Any) -> NoReturn:
    """Call a function of the API with its paths, the options given and the command's `own`; end with its report."""
    output = read_output(given)
    policy = {"policy": chosen_policy(given)} if "config" in given else {}
    with progress_line(quiet=given["quiet"]) as progress:
        report = call(*paths, progress=progress, **own, **policy, **given_options())
    finish(report, output)


def copy_options(what: str) -> Callable[[Command], Command]:
    """Add the options for a copy in OUT: where it is written, and a way to look first."""
    meaning = f"Make {what}, prove it and write nothing; the exit code is that of the original."
    options = (
        out_option("--dry-run", is_flag=True, help=meaning),
        out_option("--force", is_flag=True, help="Replace OUT if kvdoctor wrote it."),
        out_option("-o", "--out", metavar="OUT", help=f"Write {what} to this folder; it must not exist."),
    )
    return lambda command: reduce(lambda made, add: add(made), options, command)


def finish_copy(call: Callable[..., Any], given: dict[str, Any], path: str | None, what: str) -> NoReturn:
    """Call a function that writes a copy, and end with its report.

    Raises:
        UsageError: there is no OUT, and nobody asked to look.
    """
    if given["out"] is None and not given["dry_run"]:
        raise click.UsageError(f"give the folder for {what} with -o OUT, or ask with --dry-run")
    finish_with(call, given, path, None if given["dry_run"] else given["out"], force=given["force"])
