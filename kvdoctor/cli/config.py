"""`kvdoctor config`: the values in effect, and where each comes from."""

import json
from typing import TYPE_CHECKING, Any

import click

from kvdoctor.cli.options import chosen_policy, command, examples, given_options, policy_options, table_options
from kvdoctor.cli.output import format_option

if TYPE_CHECKING:
    from kvdoctor.gating.policy import EffectiveValue, Policy

SCHEMA = "kvdoctor/config/1"


@command(
    "Print the policy in effect, and where each value is from.",
    epilog=examples(
        ("kvdoctor config", "the values for the models of the policy, and where they come from"),
        ("kvdoctor config exports/marian --format json", "for one model, for programs"),
    ),
)
@click.argument("paths", nargs=-1)
@table_options("config")
@format_option(("text", "json"))
@policy_options
def config(paths: tuple[str, ...], **given: Any) -> None:
    """Print the values in effect for each PATH and their origins: default, policy, override or command line.

    Without PATH: for the models of the policy; if it names none, for a model that no override fits.
    """
    from kvdoctor import api

    policy = chosen_policy(given)
    models: tuple[str | None, ...] = paths or policy.models() or (None,)
    found = [(model, api.effective_values(policy, model, **given_options())) for model in models]
    if given["format_"] == "json":
        _print_json(policy, found)
    else:
        _print_text(policy, found, unfitting=not paths)


def _print_json(policy: "Policy", found: "list[tuple[str | None, dict[str, EffectiveValue]]]") -> None:
    from kvdoctor.report import json_format

    models = [
        {"path": model, "values": {key: {"value": each.value, "from": each.origin} for key, each in values.items()}}
        for model, values in found
    ]
    click.echo(json_format.dump({"schema": SCHEMA, "policy": policy.file, "models": models}), nl=False)


def _print_text(
    policy: "Policy", found: "list[tuple[str | None, dict[str, EffectiveValue]]]", *, unfitting: bool
) -> None:
    click.echo(f"policy: {_printable(policy.place)}" if policy.file else "policy: none; every value is a default")
    for model, values in found:
        click.echo("")
        click.echo(_printable(model) if model is not None else "a model that no override fits")
        for key, each in values.items():
            click.echo(f"  {key:<12} {_printable(_as_toml(each.value)):<28} {_printable(each.origin)}")
    models = tuple(model for model, _ in found if model is not None)
    for override in policy.unfitting(models) if unfitting else ():
        click.echo("")
        click.echo(f"override {override.number} fits none of these: {_printable(', '.join(override.models))}")


def _as_toml(value: Any) -> str:
    """Return a value as a policy has it; TOML has no word for a value that is not set."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_as_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    return "(none)" if value is None else json.dumps(value)


def _printable(text: str) -> str:
    from kvdoctor.report.safe import printable, shortened

    return printable(shortened(text))
