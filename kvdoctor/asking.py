"""What is asked for, as keyword arguments: their names, their types, and what is refused.

The command line and `import kvdoctor` both come through here, so that a wrong value is refused with the same words.
"""

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from kvdoctor.child import Limits
from kvdoctor.choices import (
    AXIS_NAMES,
    CONSUMERS,
    DTYPES,
    EXPORTERS,
    FAIL_ON,
    REQUIRED,
    Agree,
    AxisNames,
    Consumer,
    Dtype,
    ExporterName,
    FailOn,
    Required,
    why_no_use,
)
from kvdoctor.errors import UsageError
from kvdoctor.findings import Selection, all_checks, why_no_check
from kvdoctor.kept import MOST_POSITIONS, MOST_ROWS, Load
from kvdoctor.options import Options
from kvdoctor.targets import parse_targets
from kvdoctor.tolerances import why_not

if TYPE_CHECKING:
    from kvdoctor.cure.converting import Fit
    from kvdoctor.gating import How

    Path = str | os.PathLike[str]
    Words = str | Iterable[str]
    Progress = Callable[[str, int, int], None]

AFRESH = {"exporter": EXPORTERS, "dtype": DTYPES}
OLDEST_IR, OPSETS = 4, (7, 40)


class SharedOptions(TypedDict, total=False):
    """What means the same everywhere; each name is that of the command line's option (`kvdoctor COMMAND --help`).

    Lists may be one text with commas. `progress` is told of each experiment that begins: its name, which it is, counted
    from 1, and of how many. `policy` is what the report calls the file that the values are from.
    """

    consumer: Consumer
    fail_on: FailOn
    select: "Words"
    ignore: "Words"
    require: "Words"
    seed: int
    hash: bool
    progress: "Progress | None"
    policy: str | None


class InspectOptions(SharedOptions, total=False):
    """What `inspect` takes. Lengths in tokens and encoder states, `batch` in sequences."""

    targets: "Words"
    batch: int | None
    context: int | None
    encoder_length: int | None


class RunOptions(SharedOptions, total=False):
    """What all take that run the model. `timeout` in seconds for one answer, `max_memory` in MiB.

    `tolerances` are shares of the logits' spread that pass, by arithmetic (docs/policy.md).
    """

    thorough: bool
    provider: str
    timeout: float
    max_memory: int | None
    targets: "Words"
    offline: bool
    tolerances: "Mapping[str, float] | None"


class GateOptions(RunOptions, total=False):
    """What `gate` takes; `baseline` is the file of the findings that are known.

    `jobs` is how many models run side by side. `cache_dir` is where the reports of unchanged models are kept; without
    it every model is run. `cluster` is the address of a Dask scheduler. `static` runs nothing.
    """

    baseline: "Path | None"
    jobs: int | None
    cache_dir: "Path | None"
    cluster: str | None
    static: bool


class StepTestOptions(RunOptions, total=False):
    """What `step_test` takes."""

    contract: "Path | None"
    prompt_ids: "str | Iterable[int]"
    inputs: "Path | None"
    reference: "Path | None"
    trace: "Path | None"


class ReExportOptions(RunOptions, total=False):
    """What `re_export` takes besides the model and OUT; `from_` is `--from`."""

    force: bool
    fix: "Words"
    keep_unproved: bool
    layout: str | None
    axes: AxisNames
    ir_version: int | None
    opset: int | None
    from_: "Path | None"
    exporter: ExporterName | None
    dtype: Dtype | None
    task: str | None
    because: "Path | None"


class DiffOptions(RunOptions, total=False):
    """What `diff` takes."""

    static: bool
    agree: Agree | None


def refuse_unknown(command: str, asked: Iterable[str], kind: Any) -> None:
    """Refuse names that a command does not take; those of `kind` it takes.

    Raises:
        UsageError: with the name that was probably meant.
    """
    known = sorted(kind.__optional_keys__)
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise UsageError(f"{command} has no option {name!r}; {hint}")


def options_of(asked: dict[str, Any]) -> Options:
    """What all commands share, out of the keyword arguments of one; those that are its own are left alone.

    Raises:
        UsageError: a value is not one that the option takes; the message is that of the command line.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    return Options(
        consumer=one_of("consumer", given.get("consumer", "plain"), CONSUMERS),
        fail_on=one_of("fail-on", given.get("fail_on", "error"), FAIL_ON),
        selection=_selection(given),
        seed=_whole("seed", given.get("seed", 0), 0),
        provider=str(given.get("provider", "CPUExecutionProvider")),
        limits=limits_of(given),
        hash_files=_flag("hash", given.get("hash", False)),
        contract=_path(given.get("contract")),
        required=_uses(given.get("require", ())),
        thorough=_flag("thorough", given.get("thorough", False)),
        prompt=_ids(given.get("prompt_ids", ())),
        inputs=_path(given.get("inputs")),
        progress=given.get("progress"),
        reference=_path(given.get("reference")),
        offline=_flag("offline", given.get("offline", False)),
        trace=_path(given.get("trace")),
        targets=parse_targets(words(given.get("targets", ()))),
        tolerances=_tolerances(given.get("tolerances", {})),
        policy=given.get("policy"),
        load=Load(
            _whole_or_none("batch", given.get("batch"), MOST_ROWS),
            _whole_or_none("context", given.get("context"), MOST_POSITIONS),
            _whole_or_none("encoder-length", given.get("encoder_length"), MOST_POSITIONS),
        ),
    )


def limits_of(asked: dict[str, Any]) -> Limits:
    """The limits of the worker.

    Raises:
        UsageError: they are none.
    """
    timeout, memory = asked.get("timeout", 300.0), asked.get("max_memory")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < math.inf:
        raise UsageError(f"Invalid value for '--timeout': it must be a number of seconds above 0; got {timeout!r}")
    return Limits(float(timeout), None if memory is None else _whole("max-memory", memory, 1))


def repairs(given: "Words") -> tuple[str, ...]:
    """The names of repairs that may be used; none: all of them.

    Raises:
        UsageError: something was given, and it names none.
    """
    entries = (given,) if isinstance(given, str) else tuple(given)
    found = tuple(dict.fromkeys(words(entries)))
    if entries and not found:
        raise UsageError("--fix names no repair; leave it out to have all of them (docs/repairs.md)")
    return found


def fit_of(asked: dict[str, Any]) -> "Fit":
    """The layout, axes and numbers that a copy shall have; with a checkpoint the opset is the exporter's business.

    Raises:
        UsageError: a value is not one that the option takes.
    """
    from kvdoctor.cure.converting import Fit

    readable = one_of("axes", asked.get("axes", "kept"), AXIS_NAMES) == "readable"
    ir, opset = asked.get("ir_version"), asked.get("opset")
    ir = None if ir is None else _whole("ir-version", ir, OLDEST_IR)
    opset = None if opset is None else _whole("opset", opset, *OPSETS)
    return Fit(asked.get("layout"), readable, ir, opset if asked.get("from_") is None else None)


def how_of(asked: dict[str, Any]) -> "How":
    """How the models of a gate are run. No report is kept where no folder is given for them.

    Raises:
        UsageError: a value is not one that the option takes.
    """
    from pathlib import Path

    from kvdoctor.gating import How

    jobs, kept = asked.get("jobs"), _path(asked.get("cache_dir"))
    return How(
        None if jobs is None else _whole("jobs", jobs, 1), None if kept is None else Path(kept), asked.get("cluster")
    )


def making_of(asked: dict[str, Any]) -> dict[str, Any]:
    """How an export is made afresh.

    Raises:
        UsageError: a value is not one that the option takes.
    """
    for name, choices in AFRESH.items():
        if asked.get(name) is not None:
            one_of(name, asked[name], choices)
    how = {name: asked.get(name) for name in ("exporter", "opset", "dtype", "task")}
    return {**how, "because": _path(asked.get("because"))}


def refuse_without_checkpoint(asked: dict[str, Any], path: Any) -> None:
    """Refuse what only an export made afresh can do.

    Raises:
        UsageError: with what to give as well.
    """
    if path is None:
        raise UsageError("give PATH, the model to repair; or --from CHECKPOINT to export one afresh")
    for name in ("exporter", "dtype", "task", "because"):
        if asked.get(name) is not None:
            raise UsageError(f"--{name} is for an export made afresh: give --from CHECKPOINT as well")


def one_of(option: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """The value, if it is one of the choices.

    Raises:
        UsageError: it is none of them.
    """
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise UsageError(f"Invalid value for '--{option}': {value!r} is not one of {known}.")
    return value


def words(given: "Words") -> tuple[str, ...]:
    """A text, or several, each of which may be a list with commas."""
    entries = (given,) if isinstance(given, str) else tuple(given)
    return tuple(word.strip() for entry in entries for word in str(entry).split(",") if word.strip())


def _selection(given: Mapping[str, Any]) -> Selection:
    """What counts. A selection that leaves no check is refused: it would call every model healthy."""
    selection = Selection(_codes(given.get("select", ())), _codes(given.get("ignore", ())))
    if not any(selection.takes(check.code, check.name) for check in all_checks()):
        raise UsageError(
            "what is selected and ignored (--select, --ignore, or these keys of the policy) leaves no check; "
            "`kvdoctor explain` lists all of them"
        )
    return selection


def _codes(given: "Words") -> tuple[str, ...]:
    """Split `KV1,KV203`, and refuse what selects nothing: a typing error must not make a gate green."""
    codes = words(given)
    if (reason := why_no_check(codes)) is not None:
        raise UsageError(reason)
    return codes


def _uses(given: "Words") -> tuple[Required, ...]:
    """Split `batch,beam`, and refuse what is no use."""
    asked = dict.fromkeys(words(given))
    if (reason := why_no_use(asked)) is not None:
        raise UsageError(f"--require {reason}")
    return tuple(use for use in REQUIRED if use in asked)


def _tolerances(given: Mapping[str, float]) -> dict[str, float]:
    for exactness, passes in given.items():
        if (reason := why_not(exactness, passes)) is not None:
            raise UsageError(f"tolerances: {reason}")
    return dict(given)


def _ids(given: "str | Iterable[int]") -> tuple[int, ...]:
    """Split `1,2,3`."""
    try:
        return tuple(int(word) for word in (given.split(",") if isinstance(given, str) else given) if str(word).strip())
    except (ValueError, TypeError):
        raise UsageError(f"--prompt-ids takes whole numbers, as in 1,2,3; got {given!r}") from None


def _whole(option: str, value: Any, least: int, most: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"Invalid value for '--{option}': {value!r} is not a valid integer.")
    if value < least or (most is not None and value > most):
        allowed = f"x>={least}" if most is None else f"{least}<=x<={most}"
        raise UsageError(f"Invalid value for '--{option}': {value} is not in the range {allowed}.")
    return value


def _whole_or_none(option: str, value: Any, most: int) -> int | None:
    return None if value is None else _whole(option, value, 1, most)


def _path(given: Any) -> str | None:
    if given is None:
        return None
    try:
        return os.fsdecode(given)
    except TypeError:
        raise UsageError(f"a path is a text or an os.PathLike; got {given!r}") from None


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"Invalid value for '--{option}': {value!r} is not a valid boolean.")
    return value
