"""`kvdoctor explain`, `schema` and `env`: they need no model."""

import sys
from typing import TYPE_CHECKING

import click

from kvdoctor.cli.options import command, examples
from kvdoctor.cli.output import format_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdoctor.findings import Check, Issue
    from kvdoctor.report.info_document import Explanation
    from kvdoctor.report.known_messages import KnownMessage

SCHEMAS = ("report", "gate", "contract", "diff", "baseline", "explain", "env")


def _complete_checks(_context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    from kvdoctor import api

    words = (word for check in api.list_checks() for word in (check.code, check.name))
    return [word for word in words if word.startswith(start)]


@command(
    "Explain a finding, or look up an error message.",
    epilog=examples(
        ("kvdoctor explain KV203", "by code"),
        ("kvdoctor explain mask-not-offset", "by name"),
        ("kvdoctor explain KV3", "all checks of a kind"),
        ("kvdoctor explain 'MatMul dimension mismatch'", "a message of the runtime"),
        ("kvdoctor explain", "all of them"),
        ("kvdoctor explain KV203 --format json", "for programs"),
    ),
)
@click.argument("text", required=False, shell_complete=_complete_checks)
@format_option(("text", "json"))
def explain(text: str | None, format_: str) -> None:
    """Explain a finding by its code or name, or look up an error message. Without TEXT: list all checks."""
    from kvdoctor import api

    checks, messages = _find(text)
    issues = () if checks or text is None else api.find_issues(text)
    if format_ == "json":
        from kvdoctor.report import json_format

        click.echo(json_format.dump(_document(checks, messages, issues).to_dict()), nl=False)
    elif messages or issues:
        _print_messages(messages)
        _print_issues(issues)
    elif text is not None and len(checks) == 1 and text.lower() in (checks[0].code.lower(), checks[0].name):
        _print_check(checks[0])
    else:
        _list_checks(checks)


def _find(text: str | None) -> "tuple[tuple[Check, ...], tuple[KnownMessage, ...]]":
    """The checks that a text names, or the known messages that are like it.

    Raises:
        UsageError: there are none.
    """
    from kvdoctor import api
    from kvdoctor.errors import UsageError

    if text is None:
        return api.list_checks(), ()
    if not text.strip():
        raise UsageError(
            "the text is empty: give a code, a name or a message; `kvdoctor explain` alone lists all checks"
        )
    try:
        return (api.explain(text),), ()
    except UsageError:
        if found := api.find_checks(text.strip()):
            return found, ()
        messages = api.find_messages(text)
        if messages or api.find_issues(text):
            return (), messages
        if " " in text.strip():
            known = (
                "docs/faq.md lists the known ones, and `kvdoctor step-test MODEL` finds the cause by running the model"
            )
            raise UsageError(f"no known error message is like {text.strip()[:80]!r}; {known}") from None
        raise


def _document(
    checks: "tuple[Check, ...]", messages: "tuple[KnownMessage, ...]", issues: "tuple[Issue, ...]"
) -> "Explanation":
    from kvdoctor import api
    from kvdoctor.report.info_document import ExplainedCheck, ExplainedMessage, Explanation

    return Explanation(
        tuple(
            ExplainedCheck(
                each.code,
                each.name,
                each.summary,
                each.documentation,
                api.list_graph_repairs(each.name),
                api.list_issues(each.name),
            )
            for each in checks
        ),
        tuple(ExplainedMessage(each.seen, each.question, each.answer) for each in messages),
        issues,
    )


def _list_checks(checks: "Iterable[Check]") -> None:
    listed = list(checks)
    width = max((len(check.name) for check in listed), default=0)
    for check in listed:
        click.echo(_fill(check.summary, f"{check.code}  {check.name:<{width}} "))


def _print_check(found: "Check") -> None:
    from kvdoctor import api

    text = found.documentation
    if repairs := api.list_graph_repairs(found.name):
        text += f"\n\nRepairs that `kvdoctor re-export` tries (docs/repairs.md): {', '.join(repairs)}."
    issues = "".join(f"\n- {_format_issue(issue)}" for issue in api.list_issues(found.name))
    text += f"\n\nKnown issues of other projects:{issues}" if issues else ""
    click.echo("\n\n".join([f"{found.code} {found.name}", *(_fill(part) for part in text.split("\n\n"))]))


def _print_messages(messages: "tuple[KnownMessage, ...]") -> None:
    """The questions that decide, each with its answer."""
    if not messages:
        return
    click.echo("MODEL is your export. Steps are counted from 0, the prefill.")
    for message in messages:
        click.echo(f"\n{_fill(message.seen)}\n{_fill(message.question, '  ')}\n{_fill(message.answer, '  -> ')}")
    click.echo("\nMore messages: docs/faq.md. `kvdoctor step-test MODEL` decides by running the model.")


def _print_issues(issues: "tuple[Issue, ...]") -> None:
    if issues:
        click.echo("\nKnown issues of other projects (docs/known-issues.md):")
    for issue in issues:
        click.echo(_fill(_format_issue(issue), "- "))


def _format_issue(issue: "Issue") -> str:
    from kvdoctor.report.wording.finding import format_issue

    return format_issue(issue)


def _fill(text: str, first: str = "") -> str:
    """A paragraph, wrapped on a terminal only."""
    if not sys.stdout.isatty():
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
