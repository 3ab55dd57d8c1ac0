"""`kvdoctor explain`, `schema` and `env`: they need no model."""

import os
import sys
from typing import TYPE_CHECKING

import click

from kvdoctor.cli.options import command, examples
from kvdoctor.cli.output import format_option

if TYPE_CHECKING:
    from kvdoctor.findings import Issue
    from kvdoctor.report.info_document import ExplainedCheck, ExplainedMessage, Explanation

SCHEMAS = ("report", "gate", "contract", "diff", "baseline", "explain", "env")


def _complete_checks(_context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    from kvdoctor import api

    words = (word for check in api.list_checks() for word in (check.code, check.name))
    return [word for word in words if word.startswith(start)]


@command(
    "Explain a finding or a term, or look up an error message.",
    epilog=examples(
        ("kvdoctor explain KV203", "by code"),
        ("kvdoctor explain mask-not-offset", "by name"),
        ("kvdoctor explain KV3", "all checks of a kind"),
        ("kvdoctor explain 'MatMul dimension mismatch'", "a message of the runtime"),
        ("kvdoctor explain 'wrong from the second token on'", "a symptom"),
        ("kvdoctor explain 'shared buffer'", "a term, an experiment or a command"),
        ("kvdoctor explain", "all of them"),
        ("kvdoctor explain KV203 --format json", "for programs"),
    ),
)
@click.argument("text", nargs=-1, shell_complete=_complete_checks)
@format_option(("text", "json"))
def explain(text: tuple[str, ...], format_: str) -> None:
    """Explain a finding by its code or name, a term or an experiment, or look up an error message or a symptom.

    Without TEXT: list all checks.
    """
    from kvdoctor import api

    asked = " ".join(text) or None  # quoted or not
    found = _explain_command(asked) or api.explain(asked)
    if format_ == "json":
        from kvdoctor.report import json_format

        click.echo(json_format.dump(found.to_dict()), nl=False)
        return
    for name in found.names:
        click.echo(_fill(name.text, f"{name.name} ({name.kind}): "))
    if found.messages or found.issues:
        _print_messages(found.messages)
        if found.issues:
            click.echo("\nKnown issues of other projects (docs/known-issues.md):")
        for issue in found.issues:
            click.echo(_fill(_format_issue(issue), "- "))
    elif len(found.checks) == 1 and not found.names:
        _print_check(found.checks[0])
    elif found.checks:
        width = max(len(check.name) for check in found.checks)
        for check in found.checks:
            click.echo(_fill(check.summary, f"{check.code}  {check.name:<{width}} "))
    elif not found.names:
        _print_closest(found.closest)


def _explain_command(text: str | None) -> "Explanation | None":
    """The purpose of a command, by its name or by what people call it."""
    from kvdoctor.cli.main import find_command, meant_command
    from kvdoctor.report.info_document import ExplainedName, Explanation

    name = meant_command(text.strip().lower()) if text else None
    command = None if name is None else find_command(name)
    if name is None or command is None:
        return None
    purpose = f"{command.get_short_help_str(200)} `kvdoctor {name} -h` lists what it takes."
    return Explanation(names=(ExplainedName("command", f"kvdoctor {name}", purpose),))


def _print_check(found: "ExplainedCheck") -> None:
    text = found.text
    if found.repairs:
        text += f"\n\nRepairs that `kvdoctor re-export` tries (docs/repairs.md): {', '.join(found.repairs)}."
    click.echo("\n\n".join([f"{found.code} {found.name}", *(_fill(part) for part in text.split("\n\n"))]))
    if found.issues:
        click.echo("\nKnown issues of other projects:")
    for issue in found.issues:
        click.echo(_fill(_format_issue(issue), "- "))


def _print_messages(messages: "tuple[ExplainedMessage, ...]") -> None:
    """The questions that decide, each with its answer."""
    if not messages:
        return
    click.echo("MODEL is your export. Steps are counted from 0, the prefill.")
    seen = ""
    for message in messages:
        if message.seen != seen:
            click.echo("\n" + _fill(message.seen))
        seen = message.seen
        click.echo(f"{_fill(message.question, '  ')}\n{_fill(message.answer, '    -> ')}")
    click.echo("\nMore messages: docs/faq.md. `kvdoctor step-test MODEL` decides by running the model.")


def _print_closest(closest: tuple[str, ...]) -> None:
    """What to do with a text that is not known."""
    click.echo(_fill("no entry" + ("; closest:" if closest else "")))
    for seen in closest:
        click.echo(_fill(seen, "- "))
    click.echo(_fill("`kvdoctor step-test MODEL` finds the cause by running the model; a loop of yours: `--trace`"))


def _format_issue(issue: "Issue") -> str:
    from kvdoctor.report.wording.finding import format_issue

    return format_issue(issue)


def _fill(text: str, first: str = "") -> str:
    """A paragraph, wrapped on a terminal and where COLUMNS says how wide."""
    if not (sys.stdout.isatty() or (os.environ.get("COLUMNS") and "LINES" not in os.environ)):
        return first + text
    import shutil
    import textwrap

    width, indent = min(shutil.get_terminal_size().columns, 120), " " * len(first)
    made = textwrap.TextWrapper(width, first, indent, break_long_words=False, break_on_hyphens=False)
    return made.fill(text)


@command("Print the JSON Schema of a document.", epilog=examples(("kvdoctor schema report", "that of `--format json`")))
@click.argument("name", metavar="NAME", type=click.Choice(SCHEMAS))
def schema(name: str) -> None:
    """Print the JSON Schema of a document. NAME: report, gate, contract, diff, baseline, explain or env."""
    from kvdoctor.api import schemas
    from kvdoctor.report import json_format

    click.echo(json_format.dump(schemas()[name]), nl=False)


@command(
    "Print versions, execution providers and extras.",
    epilog=examples(("kvdoctor env", "to paste into a bug report")),
)
@format_option(("text", "json"))
def env(format_: str) -> None:
    """Print versions, execution providers and extras, each with the command that installs what is missing."""
    from kvdoctor import api

    found = api.describe_environment()
    if format_ == "json":
        from kvdoctor.report import json_format

        click.echo(json_format.dump(found.to_dict()), nl=False)
    else:
        click.echo(_fill(found.head))
        for one in found.components:
            click.echo(_fill(one.text, f"{one.state:<8} "))
