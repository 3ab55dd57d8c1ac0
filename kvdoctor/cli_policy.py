"""Joins the policy of a project with what the command line says, which weighs more.

The commands that judge a model follow the policy: `gate`, `step-test` and `inspect`. Those that write something
(`re-export`, `repro`) do what their command line says.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvdoctor.policy import Policy, Value


def policy_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """Where the policy comes from."""
    options = [
        click.option("--config", metavar="FILE", expose_value=False, callback=_kept, help="Take the policy from here."),
        click.option("--no-config", is_flag=True, expose_value=False, callback=_kept, help="Follow no policy."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def ruled(model: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """What a command was given, with what the policy says for a model in the place of what was not said.

    None is for what is said once for all models (`jobs`, `cache`) and for a model that no override fits. Tolerances,
    which the command line does not take, and the policy's file are added where there are any.

    Raises:
        UsageError: the policy cannot be read, or says what no policy can.
    """
    policy = policy_of()
    if policy.file is None:
        return given
    found = in_effect(policy, model, given)
    made = {**given, "policy": policy.file}
    for key, value in found.items():
        parameter = _parameter(key)
        if parameter in given:
            made[parameter] = tuple(value.value) if isinstance(value.value, list) else value.value
    if "no_cache" in given:
        made["no_cache"] = given["no_cache"] or not found["cache"].value
    if "timeout" in given and found["tolerances"].value:
        made["tolerances"] = dict(found["tolerances"].value)
    return made


def in_effect(policy: "Policy", model: str | None, given: dict[str, Any]) -> "dict[str, Value]":
    """What holds for a model by key, each with where it comes from; None is a model that no override fits."""
    from kvdoctor.policy import KEYS

    said = {key.name: given[key.parameter] for key in KEYS if key.parameter in given and _was_said(key.parameter)}
    if _was_said("no_cache"):
        said["cache"] = False
    return policy.effective(model, {name: list(v) if isinstance(v, tuple) else v for name, v in said.items()})


def policy_of() -> "Policy":
    """The policy that the command at hand follows; read once.

    Raises:
        UsageError: it cannot be read, or the file that was named holds none.
    """
    from kvdoctor.errors import UsageError
    from kvdoctor.policy import Policy, find_policy, read_policy

    meta = click.get_current_context().meta
    if "kvdoctor.policy" not in meta:
        file, none = meta.get("kvdoctor.config"), meta.get("kvdoctor.no_config")
        if file and none:
            raise click.UsageError("give --config FILE or --no-config, not both")
        found = Policy() if none else read_policy(file) if file else find_policy()
        if found is None:
            raise UsageError(f"{file} has no [tool.kvdoctor]; give a file that has one, or a kvdoctor.toml")
        meta["kvdoctor.policy"] = found
    policy: Policy = meta["kvdoctor.policy"]
    return policy


def models_of(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The models that a gate is about: those named, else those of the policy.

    Raises:
        UsageError: there are neither.
    """
    if paths:
        return paths
    policy = policy_of()
    found = policy.models()
    if not found:
        where = f"{policy.place} names no models" if policy.file else "no policy was found (kvdoctor.toml)"
        raise click.UsageError(f"give the PATH of a model; {where}")
    return found


def _kept(context: click.Context, option: click.Parameter, value: Any) -> Any:
    context.meta[f"kvdoctor.{option.name}"] = value
    return value


def _was_said(parameter: str) -> bool:
    source = click.get_current_context().get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(key: str) -> str:
    from kvdoctor.policy import BY_NAME

    return BY_NAME[key].parameter
