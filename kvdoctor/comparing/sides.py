"""The two sides of a diff: a model is diagnosed, a report that was written earlier is read."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.cure.proof import Side
from kvdoctor.doctor import inspect, step_test
from kvdoctor.errors import UsageError
from kvdoctor.model_folder import open_folder
from kvdoctor.options import Options
from kvdoctor.report.diff_document import Compared
from kvdoctor.report.document import Report
from kvdoctor.report.stored import is_report, read_report
from kvdoctor.runtimes import Runtime

ASKED_ALIKE = ("consumer", "require", "thorough", "target")
"""Options that say what is looked for: with others, findings come and go that are no change of the model."""
NOT_TAKEN = ("contract", "trace", "reference", "inputs", "prompt_ids")
"""The same of the step test, which a diff does not take."""


@dataclass(frozen=True)
class Seen:
    """One side as the user wrote its path, with its report and the folder of its logits; `stored` for a report."""

    path: str
    side: Side
    stored: bool

    @property
    def report(self) -> Report:
        """What was found."""
        return self.side.report

    def facts(self) -> Compared:
        """The side as the document shows it."""
        report = self.report
        source = "report" if self.stored else "model"
        return Compared(self.path, source, report.model.path, report.verdict, report.environment)  # type: ignore[arg-type]


@contextmanager
def both(a: str, b: str, options: Options, static: bool) -> Iterator[tuple[Seen, Seen]]:
    """Both sides, for as long as their logits lie in a private folder. Reports are read before any model is run.

    Raises:
        UsageError: there is nothing at a path, or a report cannot be read, or was made for another loop.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    stored = {path: _stored(path, options) for path in dict.fromkeys((a, b)) if is_report(path)}
    _refuse_other_questions(stored.get(a), stored.get(b), (a, b))
    for path in (a, b):
        if path not in stored and not Path(path).exists():
            open_folder(path)  # refuses it, before the other side is run
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvdoctor-")))
        needed = not static and any(path not in stored for path in (a, b))
        runtime = opened.enter_context(Runtime(options.limits)) if needed else None
        sides = []
        for name, path in (("a", a), ("b", b)):
            logits = scratch / name
            logits.mkdir()
            report = stored.get(path)
            if report is None:
                report = inspect(path, options) if runtime is None else step_test(path, options, runtime, logits)
            sides.append(Seen(path, Side(report, logits), path in stored))
        yield sides[0], sides[1]


def _stored(path: str, options: Options) -> Report:
    report = read_report(path)
    mine = options.as_arguments()
    for name in ASKED_ALIKE:
        theirs, ours = (_words(arguments.get(name)) for arguments in (report.arguments, mine))
        if theirs != ours:
            raise UsageError(
                f"{path!r} was written {_with(name, theirs)}, and this is asked {_with(name, ours)}: their findings "
                f"cannot be compared; ask for both in the same way"
            )
    return report


def _refuse_other_questions(a: Report | None, b: Report | None, paths: tuple[str, str]) -> None:
    """Refuse reports in which more was asked than of the other side."""
    for name in NOT_TAKEN:
        asked = [None if report is None else report.arguments.get(name) for report in (a, b)]
        if asked[0] != asked[1]:
            path = paths[0] if asked[0] is not None else paths[1]
            option = name.replace("_", "-")
            raise UsageError(f"{path!r} was written with --{option}, which the other side was not; leave it out there")


def _with(name: str, value: str) -> str:
    if not value:
        return f"without --{name}"
    return f"with --{name}" + ("" if value == "True" else f" {value}")


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")
