"""What the commands that judge many models share: which models, by which options, against which baseline."""

from typing import TYPE_CHECKING, Any

import click

from kvdoctor.cli_options import asked_of_a_model
from kvdoctor.cli_policy import in_effect, models_of, policy_of, ruled

if TYPE_CHECKING:
    from kvdoctor.baseline import Baseline
    from kvdoctor.gating import Job
    from kvdoctor.options import Options
    from kvdoctor.progress import Told

OF_ALL_MODELS = ("static", "by_folder", "baseline", "jobs", "no_cache", "cache_dir", "cluster")
"""Parameters that are about the models of a gate together."""


def jobs_of(paths: tuple[str, ...], given: dict[str, Any], told: "Told | None" = None) -> "list[Job]":
    """The models that were named, or those of the policy, each with the options that hold for it.

    Raises:
        UsageError: there are none, or the policy cannot be followed.
    """
    from kvdoctor import gating

    named = models_of(paths)
    named = gating.exports_of(named) if given.get("by_folder") else named
    return [gating.Job(path, _options(ruled(path, given), told)) for path in named]


def baseline_of(given: dict[str, Any]) -> "Baseline | None":
    """The baseline that was named, else that of the policy; None where there is none.

    Raises:
        UsageError: it cannot be read.
    """
    from kvdoctor.baseline import read_baseline

    file = baseline_file(given)
    return None if file is None else read_baseline(file)


def baseline_file(given: dict[str, Any]) -> str | None:
    """The name of the baseline's file, by the command line or the policy."""
    said: str | None = given.get("baseline")
    return said if said is not None else policy_of().baseline()


def origins(model: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """What holds for a model and where it comes from, as `kvdoctor config` shows it: {key: {value, from}}."""
    found = in_effect(policy_of(), model, given)
    return {key: {"value": value.value, "from": value.origin} for key, value in found.items()}


def _options(given: dict[str, Any], told: "Told | None") -> "Options":
    from kvdoctor.asking import options_of

    return options_of({**asked_of_a_model(given, OF_ALL_MODELS), "progress": told})


baseline_option = click.option(
    "--baseline", metavar="FILE", help="Findings that are known, each with its reason (docs/baseline.md)."
)
