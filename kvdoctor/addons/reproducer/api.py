"""`repro` as a function."""

import os
from typing import TYPE_CHECKING

from kvdoctor.api import JudgingOptions, read_given

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvdoctor.api import Path
    from kvdoctor.report.document import Report


class ReproOptions(JudgingOptions, total=False):
    """The options of `repro`."""


def repro(path: "Path", out: "Path", *, force: bool = False, **options: "Unpack[ReproOptions]") -> "Report":
    """Write the smallest model without weights and the script that show the leading failure into the folder `out`.

    Nothing is written where the model has no finding at or above `fail_on`, or where the failure cannot be shown
    without the weights: `report.reproducer` says which. `force` replaces an `out` that kvdoctor wrote.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = read_given("repro", options)
    from kvdoctor.addons.reproducer.pipeline import repro as run

    return run(os.fspath(path), os.fspath(out), asked, force=force)
