"""The plan of a gate: its models, the options of each and the settings of the run, from arguments and the policy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdoctor.errors import UsageError
from kvdoctor.gating.baseline import today
from kvdoctor.gating.baseline_match import BaselineRequest
from kvdoctor.gating.jobs import GateJob, GateSettings
from kvdoctor.gating.models import export_folders, find_models
from kvdoctor.gating.policy import Policy
from kvdoctor.options import BaselineChoices, GateChoices, Options, read_options, refuse_for_runs
from kvdoctor.records import record


@record
class GatePlan:
    """A gate before it runs: the jobs, the settings, and the options that hold for all models together."""

    jobs: tuple[GateJob, ...]
    settings: GateSettings
    choices: GateChoices


def plan_gate(command: str, paths: Sequence[str], given: Mapping[str, Any], policy: Policy | None) -> GatePlan:
    """Plan a gate for the models at the paths, or for those of the policy if there are none.

    Raises:
        UsageError: there is no model, or an option does not take a value.
    """
    models = paths or (policy.models() if policy is not None else ())
    if not models:
        raise UsageError(f"give the PATH of a model; {_explain_no_model(policy)}")
    choices = read_options(GateChoices, policy.complete(None, given) if policy is not None else given)
    if choices.static:
        refuse_for_runs(command, given)
    models = export_folders(models) if choices.by_folder else find_models(models)
    if policy is None:
        options = read_options(Options, given)
        jobs = tuple(GateJob(path, options) for path in models)
    else:
        jobs = tuple(GateJob(path, policy.read_options(command, path, given)) for path in models)
    return GatePlan(jobs, _read_settings(choices, jobs[0].options), choices)


def read_baseline_request(choices: BaselineChoices) -> BaselineRequest:
    """Read the changes to make to a baseline.

    Raises:
        UsageError: nothing is to be done, or `until` is not of use.
    """
    if not (choices.reason or choices.prune or choices.check):
        raise UsageError(
            "give --reason TEXT to add the findings that count, --prune to remove those that are not found any more, "
            "or --check to write nothing"
        )
    if choices.until is not None and choices.reason is None:
        raise UsageError("--until goes with --reason TEXT; the dates of known findings are changed in the file")
    if choices.until is not None and choices.until < today().isoformat():
        raise UsageError(f"--until {choices.until} is in the past; give a later date")
    return BaselineRequest(choices.reason, choices.until, choices.prune)


def _explain_no_model(policy: Policy | None) -> str:
    if policy is None:
        return "there is no model to check"
    return f"{policy.place} names no models" if policy.file else "no policy was found (kvdoctor.toml)"


def _refuse_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made; without the user's own the gate is slower, and otherwise the same.

    Raises:
        UsageError: it cannot be made.
    """
    from kvdoctor.runtime.environments import cache_folder

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if folder.is_relative_to(cache_folder()):
            return
        why = f"cannot be made ({error.strerror or error})"
        raise UsageError(f"--cache-dir {str(folder)!r} {why}; give another one, or --no-cache") from None


def _read_settings(choices: GateChoices, options: Options) -> GateSettings:
    if choices.jobs is not None and choices.cluster is not None:
        raise UsageError("--jobs is for this machine; a cluster runs as many models as its workers have threads")
    kept = Path(choices.cache_dir) if choices.cache_dir is not None else None
    if kept is not None and kept.exists() and not kept.is_dir():
        raise UsageError(f"--cache-dir {str(kept)!r} is no folder; give another one, or --no-cache")
    if kept is not None and choices.cache:
        _refuse_folder(kept)
    return GateSettings(choices.jobs, kept if choices.cache else None, choices.cluster, options.show_line)
