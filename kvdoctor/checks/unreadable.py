"""A file is not a readable ONNX model.

What it means: the file is empty, cut short, damaged, a Git LFS pointer, an ONNX Runtime `.ort` file or something else
that only bears the name. Nothing in it was checked, so the exit code is 3 where this is the only finding.

Reproduce: `python -c "import onnx; onnx.load('FILE')"` fails or gives an empty model.

Repair: fetch the file again; `git lfs pull` for a pointer; give the `.onnx` file that an `.ort` file was made from.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Advice, Fault, check


@check("KV001", "unreadable", "file", incomplete=True)
def unreadable(case: Case) -> Iterator[Fault]:
    """A file that could not be read at all."""
    if case.file is None or case.file.problem is None:
        return
    yield Fault(
        severity="error",
        file=case.file.name,
        subject=(case.file.name,),
        where=f"file {case.file.name}",
        promised="an ONNX model",
        observed=case.file.problem.reason,
        cause="the file cannot be read as an ONNX model, so nothing in it was checked",
        advice=Advice("caller", case.file.problem.advice),
    )
