"""`record`: writes the golden numbers of a model that decodes right."""

import os
from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.diagnose.golden import CODE as GOLDEN_CHECK
from kvdoctor.diagnose.golden import CannotDigest, digest_stack, render_golden
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.findings import NotChecked
from kvdoctor.model.output_folder import write_whole
from kvdoctor.options import Options
from kvdoctor.report.document import Report, exit_code
from kvdoctor.report.wording.units import format_bytes
from kvdoctor.runtime.client import Runtime


def record_golden(path: str, out: str, options: Options, runtime: Runtime, *, force: bool = False) -> Report:
    """Step-test a model, and write its golden numbers where nothing counts against it; a note of the report says so.

    Golden numbers of a faulty model would keep its fault.

    Raises:
        UsageError: there is nothing at the path, or `out` exists or cannot be written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    _refuse_unfit(out, force)
    report = replace(step_test(path, options, runtime), command="record")
    if exit_code(report, options.fail_on):
        return _add_note(report, f"no golden numbers were written to {out}: they are those of a healthy model")
    folder, stacks = open_folder(path), []
    for stack in folder.stacks:
        contract = read_contract(stack, folder.side_cars)
        try:
            stacks.append(digest_stack(stack, contract, folder.root.absolute(), options, runtime))
        except CannotDigest as error:
            missing = NotChecked(stack.name, GOLDEN_CHECK, f"no golden numbers were written: {error}", essential=True)
            return replace(report, verdict="incomplete", not_checked=(*report.not_checked, missing))
    content = render_golden(folder.root.name, tuple(stacks), options.seed, runtime.versions.get("onnxruntime", ""))
    write_whole(Path(out), content)
    calls = sum(len(walk.logits) for stack in stacks for walk in stack.walks)
    size = format_bytes(len(content))
    names = ", ".join(stack.name for stack in stacks)
    return _add_note(report, f"{out}: golden numbers of {names}: {calls} calls, {size}")


def _refuse_unfit(out: str, force: bool) -> None:
    place = Path(out)
    if place.is_dir():
        raise UsageError(f"{out!r} is a folder; give a file in it")
    if os.path.lexists(place) and not force:
        raise UsageError(f"{out!r} exists; --force replaces it")
    if not place.absolute().parent.is_dir():
        raise UsageError(f"the folder of {out!r} does not exist; make it first")


def _add_note(report: Report, note: str) -> Report:
    return replace(report, notes=(note, *report.notes))
