"""`kvdoctor loop`: programs that decode."""

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdoctor.cli.options import GroupedOption, command, examples, given_options, table_options
from kvdoctor.cli.output import end, progress_line, quiet_option
from kvdoctor.options import INPUT, OUTPUT

if TYPE_CHECKING:
    from kvdoctor.addons.loops.pipeline import WrittenLoop

_option = partial(click.option, cls=GroupedOption)


def _complete_languages(_context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    from kvdoctor.addons.loops import api

    return [name for name in api.list_languages() if name.startswith(start)]


@command(
    "Write a program that decodes with the model.",
    epilog=examples(
        ("kvdoctor loop exports/marian --language rust -o decode", "a project for cargo"),
        ("kvdoctor loop exports/marian --language python --check", "try it, keep nothing"),
    ),
)
@click.argument("path", type=click.Path())
@_option(
    "-l",
    "--language",
    required=True,
    metavar="NAME",
    group=OUTPUT,
    shell_complete=_complete_languages,
    help="Write it in cpp, go, java, javascript, python, rust or typescript (docs/loops.md).",
)
@_option("-o", "--out", metavar="OUT", group=OUTPUT, help="Write the program to this folder; it must not exist.")
@_option("--force", is_flag=True, group=OUTPUT, help="Replace OUT if kvdoctor wrote it and nobody changed it.")
@_option(
    "--check",
    is_flag=True,
    group=OUTPUT,
    help="Build the program and compare its tokens with those of the model; fetches its packages (uses the network).",
)
@_option(
    "--name",
    metavar="NAME",
    group=OUTPUT,
    help="Name its crate, module, package or namespace so, to have two in one program (default: decode_loop).",
)
@_option("--stack", metavar="NAME", group=INPUT, help="Write it for this stack; else for the first that has a loop.")
@quiet_option
@table_options("loop")
def loop(path: str, language: str, out: str | None, quiet: bool, **given: Any) -> NoReturn:
    """Write a decode loop for the model as a project in OUT, from its cache contract.

    The loop is run here first. Exit code 0: written. 1: the model decodes wrong tokens in a right loop too, or the
    program does; nothing was written. 2: wrong usage. 3: there is no loop for this model, or it could not be checked.
    """
    from kvdoctor.addons.loops import api

    chosen = {"stack": given["stack"], "check": given["check"], "force": given["force"], "name": given["name"]}
    with progress_line(quiet=quiet) as progress:
        written = api.loop(path, out, language=language, progress=progress, **chosen, **given_options())
    _print(written, quiet=quiet)
    end(written.exit_code)


def _print(written: "WrittenLoop", *, quiet: bool) -> None:
    """Say what was written, and why not; only the latter where `quiet`."""
    from kvdoctor.report.escaping import printable

    if written.out is not None and not quiet:
        stack = f" (stack {printable(written.stack)})" if written.stack else ""
        click.echo(f"{printable(written.out)}: a decode loop for {printable(written.model)}{stack}")
        click.echo(f"  {', '.join(printable(name) for name in written.files)}")
    for remark in () if quiet else written.remarks:
        click.echo(f"note: {printable(remark)}")
    for result in () if quiet else written.results:
        if result.problem is None:
            click.echo(f"  ok     {result.vector}: {result.tokens} tokens as expected")
        else:
            click.echo(f"  wrong  {result.vector}: {printable(result.problem)}")
    if written.unchecked is not None:
        click.echo(f"not checked: {printable(written.unchecked)}")
    if written.reason is not None:
        click.echo(f"no loop: {printable(written.reason)}")
