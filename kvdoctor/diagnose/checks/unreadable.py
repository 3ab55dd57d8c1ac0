"""A file is not a readable ONNX model.

What it means: the file is empty, truncated, damaged, a Git LFS pointer, an ONNX Runtime `.ort` file or another file
with this extension. Nothing in it was checked, so the exit code is 3 if this is the only finding.

Reproduce: `python -c "import onnx; onnx.load('FILE')"` fails or returns an empty model.

Repair: download the file again; `git lfs pull` for a pointer; give the `.onnx` file from which an `.ort` file was made.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.context import FileContext
from kvdoctor.findings import Advice, Fault, check


@check("KV001", "unreadable", "file", incomplete=True)
def unreadable(context: FileContext) -> Iterator[Fault]:
    """A file that cannot be read."""
    problem = context.file.problem
    if problem is not None:
        cause = "the file cannot be read as an ONNX model, so nothing in it was checked"
        fault = Fault("error", (context.file.name,), cause, Advice("caller", problem.advice))
        yield fault.compare("an ONNX model", problem.reason)
