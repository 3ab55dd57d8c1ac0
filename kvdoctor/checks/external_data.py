"""External data is absent, cut short, or outside the folder of the model.

What it means: the weights are stored beside the graph, and a file that the graph names is not there, is too short for
what the graph reads from it (KV002), or lies outside both the model's folder and the folder of the real file behind a
link (KV003). A hub cache, where model and data are links into one `blobs` folder, is healthy. The graph was still
inspected; it cannot be run.

Reproduce: `python -c "import onnxruntime; onnxruntime.InferenceSession('FILE')"` fails with an external data error.

Repair: put the data file beside the model under the name that the graph holds, whole; or save the model again.

Source: the ONNX specification, external data: `location` is a path relative to the model, inside its folder.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Advice, Fault, check


@check("KV002", "external-data-missing", "file", incomplete=True)
def external_data_missing(case: Case) -> Iterator[Fault]:
    """Locations that are absent or too short."""
    yield from _faults(case, {"missing", "truncated"}, "the file beside the model, whole")


@check("KV003", "external-data-escapes", "file", incomplete=True)
def external_data_escapes(case: Case) -> Iterator[Fault]:
    """Locations outside the folder."""
    yield from _faults(case, {"escapes"}, "a file inside the folder of the model")


def _faults(case: Case, kinds: set[str], promised: str) -> Iterator[Fault]:
    file = case.file
    for problem in file.external_problems if file else ():
        if file is not None and problem.kind in kinds:
            yield Fault(
                severity="error",
                file=file.name,
                subject=(problem.tensor,),
                where=f"file {file.name}, external data {problem.location!r}",
                promised=promised,
                observed=problem.detail,
                cause="weights that the graph needs cannot be read from where it says they are",
                advice=Advice("caller", f"fetch or restore {problem.location!r} beside the model, or save it again"),
            )
