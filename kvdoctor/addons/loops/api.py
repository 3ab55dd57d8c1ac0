"""`loop` as a function."""

import os
from typing import TYPE_CHECKING

from kvdoctor.api import WorkerOptions, read_given

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from kvdoctor.addons.loops.pipeline import WrittenLoop
    from kvdoctor.api import Path


class LoopOptions(WorkerOptions, total=False):
    """The options of `loop`. `reference` is a checkpoint whose tokens the program must find as well, with `check`."""

    feed: "Mapping[str, float]"
    logits_output: str | None
    reference: "Path | None"


def loop(  # noqa: PLR0913 - one for each option of the command
    path: "Path",
    out: "Path | None" = None,
    *,
    language: str,
    stack: str | None = None,
    check: bool = False,
    force: bool = False,
    name: str | None = None,
    **options: "Unpack[LoopOptions]",
) -> "WrittenLoop":
    """Write a program that decodes with the model into the folder `out`, in one of the languages of docs/loops.md.

    The loop is run here first: for a model that decodes wrong tokens in a right loop, nothing is written. With `check`
    the program is built and must print the tokens that the model means; building fetches its packages. `force` replaces
    an `out` that kvdoctor wrote and nobody changed. `name` is that of the crate, module, package or namespace, in small
    letters, digits and underscores; else it is `decode_loop`.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = read_given("loop", options)
    from kvdoctor.addons.loops.pipeline import LoopRequest, write_loop

    target = None if out is None else os.fspath(out)
    return write_loop(LoopRequest(os.fspath(path), target, language, stack, force, check, name=name), asked)


def list_languages() -> tuple[str, ...]:
    """The languages that `loop` writes."""
    from kvdoctor.addons.loops.languages import LANGUAGES

    return tuple(LANGUAGES)
