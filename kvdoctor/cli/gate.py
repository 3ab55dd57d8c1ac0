"""`kvdoctor gate`: many models, one verdict; `baseline`: its known findings; `config`: the values in effect."""

import json
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from kvdoctor.cli.options import chosen_policy, command, examples, given_options, policy_options, table_options
from kvdoctor.cli.output import (
    closed_pipe_allowed,
    end,
    format_option,
    out_option,
    output_options,
    progress_line,
    quiet_option,
    read_output,
    show_gate,
)

if TYPE_CHECKING:
    from kvdoctor.api import WrittenBaseline
    from kvdoctor.gating.policy import EffectiveValue, Policy


CONFIG_SCHEMA = "kvdoctor/config/1"


@command(
    "Check many models for CI: one verdict.",
    epilog=examples(
        ("kvdoctor gate exports/*/", "every model, one verdict"),
        ("kvdoctor gate exports/*/ --output sarif=kvdoctor.sarif -q", "with a file for code scanning"),
        ("kvdoctor gate exports/marian --fail-on warning", "stricter"),
        ("kvdoctor gate --static --by-folder exports/marian/model.onnx", "for a hook: runs nothing"),
    ),
)
@click.argument("paths", nargs=-1, type=click.Path())
@table_options("gate")
@output_options()
@policy_options
def gate(paths: tuple[str, ...], **given: Any) -> NoReturn:
    """Inspect and step-test models for CI; without PATH, those of the policy (docs/policy.md).

    PATH is an .onnx file, a folder of exports or a pattern. Exit code 0: healthy. 1: a finding at or above --fail-on
    that the baseline does not list. 2: wrong usage. 3: something could not be checked. `kvdoctor baseline` records
    known findings that the gate accepts.
    """
    import gc

    from kvdoctor import api

    gc.disable()  # this process lives for one gate, and the models are run in others
    policy = chosen_policy(given)
    models = paths or policy.models()
    output = read_output(given, models=models)
    with progress_line(quiet=given["quiet"]) as progress:
        done = api.gate(models, policy=policy, progress=progress, **_options(static=given["static"]))
    show_gate(done, output)
    end(done.exit_code)


def with_cache_folder(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a gate, with the user's cache folder if none is given."""
    from kvdoctor import api

    return {**options, "cache_dir": options.get("cache_dir") or api.cache_folder()}


def _options(*, static: bool) -> dict[str, Any]:
    """Return the options of this gate. Where nothing is run, a variable of the environment is for other gates."""
    options = given_options()
    if not static:
        return with_cache_folder(options)
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in options.items() if source(name) is not ParameterSource.ENVIRONMENT}


@command(
    "Record known findings that a gate accepts.",
    epilog=examples(
        ('kvdoctor baseline exports/*/ --reason "the app holds it" --until 2027-03-31', "take in what counts today"),
        ("kvdoctor baseline exports/*/ --prune", "remove what is not found any more"),
        ("kvdoctor baseline exports/*/ --check", "for CI: is the file up to date?"),
    ),
)
@click.argument("paths", nargs=-1)
@out_option(
    "-o", "--out", metavar="FILE", help="Write this file.  [default: the policy's, else kvdoctor-baseline.json]"
)
@table_options("baseline")
@quiet_option
@policy_options
def baseline(paths: tuple[str, ...], out: str | None, **given: Any) -> NoReturn:
    """Run the gate, and write its findings into its baseline: those that a team lives with.

    Reasons and dates of known findings stay as they are. Exit code 0: done, or up to date. 1: with --check, not up to
    date. 2: wrong usage. 3: something could not be checked; the rest is written.
    """
    from kvdoctor import api

    check = given["check"]
    options = with_cache_folder(given_options())
    with progress_line(quiet=given["quiet"]) as progress:
        done = api.write_baseline(paths, out, policy=chosen_policy(given), progress=progress, **options)
    with closed_pipe_allowed():
        _print_baseline(done, check)
    left = done.differs or done.update.left
    end(1 if check and left else 3 if done.update.open else 0)


def _print_baseline(done: "WrittenBaseline", check: bool) -> None:
    from kvdoctor.report.escaping import printable, shortened

    update, count = done.update, len(done.update.entries)
    for line in (*update.changes, *update.left):
        click.echo(printable(shortened(line, 600)))
    for path in update.open:
        click.echo(printable(shortened(f"not checked: {path}: `kvdoctor gate` says why", 600)), err=True)
    state = f"{'would be' if check else 'was'} written" if done.differs else "up to date"
    click.echo(printable(f"{done.file}: {state}, {count} entr{'y' if count == 1 else 'ies'}"))


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
        _print_config(policy, found, unfitting=not paths)


def _print_json(policy: "Policy", found: "list[tuple[str | None, dict[str, EffectiveValue]]]") -> None:
    from kvdoctor.report import json_format

    models = [
        {"path": model, "values": {key: {"value": each.value, "from": each.origin} for key, each in values.items()}}
        for model, values in found
    ]
    click.echo(json_format.dump({"schema": CONFIG_SCHEMA, "policy": policy.file, "models": models}), nl=False)


def _print_config(
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
    """Return a value as a policy has it; TOML has no notation for a value that is not set."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_as_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    return "(none)" if value is None else json.dumps(value)


def _printable(text: str) -> str:
    from kvdoctor.report.escaping import printable, shortened

    return printable(shortened(text))
