"""`diff` and `record` as functions."""

import os
from typing import TYPE_CHECKING

from kvdoctor.addons.comparison.options import DiffChoices
from kvdoctor.api import JudgingOptions, RunOptions, read_given
from kvdoctor.choices import Agree

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvdoctor.addons.comparison.document import DiffReport
    from kvdoctor.api import Path
    from kvdoctor.gating.policy import Policy
    from kvdoctor.report.document import Report


class RecordOptions(JudgingOptions, total=False):
    """The options of `record`; they mean what they mean for `step_test`."""

    policy: "Policy | Path | None"


class DiffOptions(RunOptions, total=False):
    """The options of `diff`."""

    static: bool
    agree: Agree | None


def diff(a: "Path", b: "Path", **options: "Unpack[DiffOptions]") -> "DiffReport":
    """Compare model B with model A: contract, graph and behavior. Either may be a JSON report of kvdoctor.

    Raises:
        UsageError: there is nothing at a path, a report cannot be read, or an option does not take a value.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = read_given("diff", options)
    choices = asked.of(DiffChoices)
    from kvdoctor.addons.comparison.pipeline import compare

    return compare(os.fspath(a), os.fspath(b), choices, asked)


def record_golden(path: "Path", out: "Path", *, force: bool = False, **options: "Unpack[RecordOptions]") -> "Report":
    """Step-test the model, and write the golden numbers of a healthy one into the file `out` (`kvdoctor record`).

    `step_test` and `gate` compare with them (`against`). Nothing is written for a model with findings that count, or
    one that could not be checked. `force` replaces an `out` that exists.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = read_given("record", options, path)
    from kvdoctor.runtime.client import Runtime

    with Runtime(asked.limits) as runtime:
        from kvdoctor.addons.comparison.sides import write_golden

        return write_golden(os.fspath(path), os.fspath(out), asked, runtime, force=force)
