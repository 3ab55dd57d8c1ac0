"""`kvdoctor loop`, `probe` and `judge`: programs that decode, and what they did on another machine."""

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor.cli.options import GroupedOption, command, examples, given_options, table_options
from kvdoctor.cli.output import end, finish, output_options, progress_line, quiet_option, read_output
from kvdoctor.options import INPUT, OUTPUT

if TYPE_CHECKING:
    from kvdoctor.loops.pipeline import WrittenLoop

_option = partial(click.option, cls=GroupedOption)


def _complete_languages(_context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    from kvdoctor import api

    return [name for name in api.list_languages() if name.startswith(start)]


_language = _option(
    "-l",
    "--language",
    required=True,
    metavar="NAME",
    group=OUTPUT,
    shell_complete=_complete_languages,
    help="Write it in cpp, csharp, go, java, javascript, python, rust or typescript (docs/loops.md).",
)
_force = _option("--force", is_flag=True, group=OUTPUT, help="Replace OUT if kvdoctor wrote it and nobody changed it.")
_stack = _option(
    "--stack", metavar="NAME", group=INPUT, help="Write it for this stack; else for the first that has a loop."
)


@command(
    "Write a program that decodes with the model.",
    epilog=examples(
        ("kvdoctor loop exports/marian --language rust -o decode", "a project for cargo"),
        ("kvdoctor loop exports/marian --language python --check", "try it, keep nothing"),
    ),
)
@click.argument("path", type=click.Path())
@_language
@_option("-o", "--out", metavar="OUT", group=OUTPUT, help="Write the program to this folder; it must not exist.")
@_force
@_option(
    "--check",
    is_flag=True,
    group=OUTPUT,
    help="Build the program and compare its tokens with those of the model; fetches its packages (uses the network).",
)
@_stack
@quiet_option
@table_options("loop")
def loop(path: str, language: str, out: str | None, quiet: bool, **given: Any) -> NoReturn:
    """Write a decode loop for the model as a project in OUT, from its cache contract.

    The loop is run here first. Exit code 0: written. 1: the model decodes wrong tokens in a right loop too, or the
    program does; nothing was written. 2: wrong usage. 3: there is no loop for this model, or it could not be checked.
    """
    from kvdoctor import api

    chosen = {"stack": given["stack"], "check": given["check"], "force": given["force"]}
    with progress_line(quiet=quiet) as progress:
        written = api.loop(path, out, language=language, progress=progress, **chosen, **given_options())
    _print(written, quiet=quiet)
    end(written.exit_code)


@command(
    "Write a program that tries the model on another machine.",
    epilog=examples(
        ("kvdoctor probe exports/llama -l javascript -o probe", "for a browser, or Node"),
        ("kvdoctor probe exports/marian -l java -o probe", "for an app"),
    ),
)
@click.argument("path", type=click.Path())
@_language
@_option("-o", "--out", metavar="OUT", required=True, group=OUTPUT, help="Write the program to this folder.")
@_force
@_stack
@quiet_option
@table_options("probe")
def probe(path: str, language: str, out: str, quiet: bool, **given: Any) -> NoReturn:
    """Write a program that decodes fixed prompts on a machine where kvdoctor cannot run, and records what it got.

    A browser, a phone, another provider: run it there as its README says, and give its result to `kvdoctor judge`
    (docs/probe.md). The exit codes are those of loop.
    """
    from kvdoctor import api

    with progress_line(quiet=quiet) as progress:
        written = api.probe(
            path,
            out,
            language=language,
            stack=given["stack"],
            force=given["force"],
            progress=progress,
            **given_options(),
        )
    _print(written, quiet=quiet)
    end(written.exit_code)


@command(
    "Check the record of a probe.",
    epilog=examples(("kvdoctor judge exports/llama result.jsonl", "the first step, slot or layer that differs")),
)
@click.argument("path", type=click.Path())
@click.argument("result", type=click.Path())
@table_options("judge")
@output_options()
def judge(path: str, result: str, **given: Any) -> NoReturn:
    """Compare what a probe of the model fed and got on another machine with the contract, and with this machine.

    RESULT is the file that the program of `kvdoctor probe` wrote. Exit code 0: the same here. 1: a finding at or above
    --fail-on. 2: wrong usage. 3: something could not be checked.
    """
    from kvdoctor import api

    output = read_output(given)
    with progress_line(quiet=given["quiet"]) as progress:
        report = api.judge(path, result, progress=progress, **given_options())
    finish(report, output)


def _print(written: "WrittenLoop", *, quiet: bool) -> None:
    """Say what was written, and why not; only the latter where `quiet`."""
    from kvdoctor.report.safe import printable

    if not quiet:
        _print_done(written)
    if written.unchecked is not None:
        click.echo(f"not checked: {printable(written.unchecked)}")
    if written.reason is not None:
        click.echo(f"no loop: {printable(written.reason)}")


def _print_done(written: "WrittenLoop") -> None:
    from kvdoctor.report.safe import printable

    if written.out is not None:
        stack = f" (stack {printable(written.stack)})" if written.stack else ""
        what = "a probe" if "probe.txt" in written.files else "a decode loop"
        click.echo(f"{printable(written.out)}: {what} for {printable(written.model)}{stack}")
        click.echo(f"  {', '.join(printable(name) for name in written.files)}")
    for remark in written.remarks:
        click.echo(f"note: {printable(remark)}")
    for result in written.results:
        if result.problem is None:
            click.echo(f"  ok     {result.vector}: {result.tokens} tokens as expected ({printable(result.measured)})")
        else:
            click.echo(f"  wrong  {result.vector}: {printable(result.problem)}")
