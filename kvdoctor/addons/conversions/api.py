"""`convert` as a function."""

import os
import time
from typing import TYPE_CHECKING

from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.api import RunOptions, read_given
from kvdoctor.choices import AttentionOperator, AxisNames, CacheType, LogitsRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Unpack

    from kvdoctor.api import Path, Words
    from kvdoctor.report.document import Report


class ConvertOptions(RunOptions, total=False):
    """The options of `convert`."""

    layout: str | None
    axes: AxisNames
    ir_version: int | None
    opset: int | None
    attention: AttentionOperator | None
    cache: str | None
    cache_type: CacheType | None
    exact_layers: "str | Iterable[int]"
    logits: LogitsRows | None
    sizes: "Words"


def convert(
    path: "Path", out: "Path | None" = None, *, force: bool = False, **options: "Unpack[ConvertOptions]"
) -> "Report":
    """Convert a copy of the model in the folder `out` to another form, and prove it against the original.

    Without `out` the copy is made and proved in a private folder, which is deleted. `force` replaces an `out` that
    kvdoctor wrote. A copy that is not proved is never written.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, the model has not the form that the
            conversion needs, or an option does not take a value; nothing was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    began = time.perf_counter()
    asked = read_given("convert", options)
    choices = asked.of(ConvertChoices)
    from kvdoctor.addons.conversions.graphs.conversion import read_asked
    from kvdoctor.addons.conversions.pipeline import ConvertRequest
    from kvdoctor.addons.conversions.pipeline import convert as run

    target = None if out is None else os.fspath(out)
    return run(ConvertRequest(os.fspath(path), target, choices, read_asked(choices), force), asked).timed(began)
