"""The plan of a gate: its models, the options of each and the settings of the run, from arguments and the policy."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvdoctor.errors import UsageError
from kvdoctor.gating.baseline import today
from kvdoctor.gating.jobs import GateJob, GateSettings, LeftOut
from kvdoctor.gating.policy import DEEP, MAGIC, Policy, fits, models_at
from kvdoctor.model.files import MODEL_SUFFIXES, candidates
from kvdoctor.options import BaselineChoices, GateChoices, Options, read_options, refuse_for_runs
from kvdoctor.records import record


@record
class GatePlan:
    """A gate before it runs: the jobs, the settings, the options for all models together, and what is not checked."""

    jobs: tuple[GateJob, ...]
    settings: GateSettings
    choices: GateChoices
    left_out: tuple[LeftOut, ...] = ()


def plan_gate(command: str, paths: Sequence[str], given: Mapping[str, Any], policy: Policy | None) -> GatePlan:
    """Plan a gate for the models at the paths, or for those of the policy if there are none.

    Raises:
        UsageError: there is no model, or an option does not take a value.
    """
    models = paths or (policy.models() if policy is not None else ())
    if not models:
        why = "there is no model to check"
        if policy is not None:
            why = f"{policy.place} names no models" if policy.file else "no policy was found (kvdoctor.toml)"
        raise UsageError(f"give the PATH of a model; {why}")
    choices = read_options(GateChoices, policy.complete(None, given) if policy is not None else given)
    if choices.static:
        refuse_for_runs(command, given)
    # A file stands for its folder: a list of the files that a commit changed has several files of one export.
    folders = (path if not Path(path).is_file() else Path(path).parent.as_posix() for path in models)
    found = tuple(dict.fromkeys(folders)) if choices.by_folder else find_models(models)
    patterns = [pattern if "/" in pattern else f"{DEEP}/{pattern}" for pattern in choices.exclude]
    names = {path: {path, (policy or Policy()).relative(path) or path} for path in found}
    excluded = [path for path in found if any(fits(name, one) for name in names[path] for one in patterns)]
    left_out = [*(LeftOut(path, "excluded") for path in excluded), *_list_without_model(models, found)]
    models = [path for path in found if path not in excluded]
    if not models:
        raise UsageError(f"--exclude leaves no model of {', '.join(found)}; a gate that checks nothing must not pass")
    reads, options = list_folders(models), read_options(Options, given) if policy is None else None
    jobs = tuple(
        GateJob(path, options or policy.read_options(command, path, given), reads=reads)  # type: ignore[union-attr]
        for path in models
    )
    return GatePlan(jobs, _read_settings(choices, jobs[0].options), choices, tuple(left_out))


def refuse_no_change(choices: BaselineChoices) -> None:
    """Refuse options that change nothing. Raises UsageError: nothing is to be done, or `until` is not of use."""
    if not (choices.reason or choices.prune or choices.check):
        ways = "--prune to remove those that are not found any more, or --check to write nothing"
        raise UsageError(f"give --reason TEXT to add the findings that count, {ways}")
    if choices.until is not None and choices.reason is None:
        raise UsageError("--until goes with --reason TEXT; the dates of known findings are changed in the file")
    if choices.until is not None and choices.until < today().isoformat():
        raise UsageError(f"--until {choices.until} is in the past; give a later date")


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
    cache, ended = kept if choices.cache else None, getattr(options.progress, "end", None)
    size = choices.cache_size << 20
    return GateSettings(choices.jobs, cache, size, choices.cluster, options.show_line, ended)


MANY_MODELS, MOST_FOLDERS = 4, 64


def list_folders(models: Sequence[str]) -> tuple[str, ...]:
    """The folders of many models, and the other models: a worker that may read them serves one after the other."""
    places = [os.path.abspath(path) for path in models]  # noqa: PTH100 - what a link leads to is asked for later
    above = Counter(map(os.path.dirname, places))
    folders = {os.path.dirname(one) if above[os.path.dirname(one)] >= MANY_MODELS else one for one in places}  # noqa: PTH120
    if len(folders) > MOST_FOLDERS:
        with suppress(ValueError):  # on several drives
            folders = {os.path.commonpath(folders)}
    return tuple(sorted(folders - {"/", os.path.expanduser("~")})[:MOST_FOLDERS])  # noqa: PTH111


def find_models(paths: Sequence[str]) -> tuple[str, ...]:
    """The models at the paths, each once, in their order.

    A pattern stands for what it matches, since not every shell expands it. A folder stands for the model in it and for
    the exports below it; one without any stays, and its report says what is missing.

    Raises:
        UsageError: a pattern matches no folder and no `.onnx` file, or a folder cannot be read.
    """
    try:
        expanded = [found for path in paths for found in _expand(path)]
        return tuple(dict.fromkeys(found for path in expanded for found in _find_below(path)))
    except OSError as error:
        raise UsageError(f"{error.filename!r} cannot be searched: {error.strerror or error}") from None


def _list_without_model(paths: Sequence[str], models: Sequence[str]) -> Iterator[LeftOut]:
    """The folders in a folder of exports in which there is no model at any depth, the uppermost ones."""
    for top in (Path(path) for path in paths if path not in models and Path(path).is_dir()):
        inside: list[str] = []
        for folder in (one for one in sorted(top.iterdir()) if one.is_dir() and not one.name.startswith(".")):
            name = folder.as_posix()
            if any(f"{model}/".startswith(f"{name}/") for model in models):
                inside.append(name)
            else:
                yield LeftOut(name, "no model")
        yield from _list_without_model(inside, models)


def _expand(path: str) -> list[str]:
    """What a pattern matches; a path at which there is something, or without a pattern, is itself."""
    if not MAGIC & set(path) or os.path.lexists(path):
        return [path]
    anchor = Path(path).anchor
    below = path[len(anchor) :] if anchor else path
    folder = Path(anchor or ".")
    while below.startswith(("../", "..\\")):
        folder, below = folder / "..", below[3:]
    found = [(folder / name).as_posix() for name in models_at(folder, below.replace(os.sep, "/"))]
    if not found:
        raise UsageError(f"{path!r} matches no folder and no .onnx file")
    return found


def _find_below(path: str) -> Iterator[str]:
    """The path where it is a model, and the exports in the folders below it, links followed."""
    folder = Path(path)
    own = not folder.is_dir() or bool(candidates(folder)[1])
    if own:
        yield path
    found, seen = own, set[str]()
    for place, names, files in os.walk(path, onerror=_refuse, followlinks=True) if folder.is_dir() else ():
        names[:] = sorted(name for name in names if not name.startswith(".") and not (own and name == "onnx"))
        real = os.path.realpath(place)
        if real in seen:
            names.clear()  # a link back, or to what was found before
        elif place != path and any(Path(name).suffix in MODEL_SUFFIXES for name in files):
            found = True
            names.clear()  # what lies below an export belongs to it
            # Of a repository with its models in `onnx/`, whose configs are next to it, the repository is the model.
            yield (Path(place).parent if Path(place).name == "onnx" else Path(place)).as_posix()
        seen.add(real)
    if not found:
        yield path


def _refuse(error: OSError) -> None:
    raise error
