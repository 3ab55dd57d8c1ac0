"""`kvdoctor gate`: many models, one verdict."""

from typing import Any, NoReturn

import click
from click.core import ParameterSource

from kvdoctor.cli.options import chosen_policy, command, examples, given_options, policy_options, table_options
from kvdoctor.cli.output import end, output_options, progress_line, read_output, show_gate


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
