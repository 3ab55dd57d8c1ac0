"""`kvdoctor config`: what holds, and where it comes from."""

import json
from typing import Any

import click

from kvdoctor.cli_gate import baseline_option, origins
from kvdoctor.cli_options import offline_option, run_options, shared_options, target_options
from kvdoctor.cli_policy import policy_of, policy_options
from kvdoctor.cli_running import gate_options

SCHEMA = "kvdoctor/config/1"


@click.command()
@click.argument("paths", nargs=-1)
@baseline_option
@target_options
@offline_option
@shared_options
@run_options
@policy_options
@gate_options
def config(paths: tuple[str, ...], **given: Any) -> None:
    """Print what holds for each PATH and where it comes from: default, policy, override or command line.

    Without PATH: for the models of the policy; where it names none, for a model that no override fits.
    """
    if given["format_"] not in ("text", "json"):
        raise click.UsageError("config is printed as --format text or json")
    policy = policy_of()
    named: tuple[str | None, ...] = paths or policy.models() or (None,)
    found = [(model, origins(model, given)) for model in named]
    if given["format_"] == "json":
        from kvdoctor.report import machine

        models = [{"path": model, "values": values} for model, values in found]
        click.echo(machine.dump({"schema": SCHEMA, "policy": policy.file, "models": models}), nl=False)
        return
    click.echo(f"policy: {_shown(policy.place)}" if policy.file else "policy: none; every value is a default")
    for model, values in found:
        click.echo("")
        click.echo(_shown(model) if model is not None else "a model that no override fits")
        for key, entry in values.items():
            click.echo(f"  {key:<12} {_shown(_toml(entry['value'])):<28} {_shown(entry['from'])}")
    for override in policy.unfitting(tuple(model for model, _ in found if model is not None)) if paths == () else ():
        click.echo("")
        click.echo(f"override {override.number} fits none of these: {_shown(', '.join(override.models))}")


def _toml(value: Any) -> str:
    """A value as a policy would say it; what is not set is said in a word."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    return "(none)" if value is None else json.dumps(value)


def _shown(text: str) -> str:
    from kvdoctor.report.safe import printable, shortened

    return printable(shortened(text))
