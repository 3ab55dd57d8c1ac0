"""External data is missing, truncated, or outside the folder of the model.

Reproduce: `python -c "import onnxruntime; onnxruntime.InferenceSession('FILE')"` fails with an external data error.

Repair: put the complete data file in the folder of the model, under the name in the graph; or save the model again.

Source: the ONNX specification, external data: `location` is a path relative to the model, inside its folder.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.context import FileContext
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.model.external_data import ExternalProblem


@check("KV002", "external-data-missing", "file", incomplete=True)
def external_data_missing(context: FileContext) -> Iterator[Fault]:
    """External data that is missing or too short.

    What it means: the weights are stored outside of the graph, and a file that the graph names does not exist, or is
    shorter than the graph requires. The graph was still inspected; it cannot be run.
    """
    yield from _find_problems(context, {"missing", "truncated"}, "the complete file in the folder of the model")


@check("KV003", "external-data-escapes", "file", incomplete=True)
def external_data_escapes(context: FileContext) -> Iterator[Fault]:
    """External data outside the folder of the model.

    What it means: the graph names a data file outside both the model's folder and the folder of the target of a
    link. kvdoctor does not open it. A hub cache, where model and data are links into one `blobs` folder, is valid.

    Repair: put the data file into the model's folder, and save the model with a `location` relative to it.
    """
    yield from _find_problems(context, {"escapes"}, "a file inside the folder of the model")


def _find_problems(context: FileContext, kinds: set[str], declared: str) -> Iterator[Fault]:
    """One fault for each location: that of several graphs is reported once, at the first of them, and names all."""
    file = context.file
    for problem in file.external_problems:
        if problem.kind not in kinds:
            continue
        at, own = (problem.kind, problem.location), file.path.parent
        shared = [one for one in context.folder.files if one.path.parent == own and problem.location]
        with_it = {one.name for one in shared if at in {(o.kind, o.location) for o in one.external_problems}}
        sharing = [one.name for one in context.folder.files if one.name in {*with_it, file.name}]
        if sharing[0] != file.name:
            continue
        others = tuple(sharing[1:])
        graphs = f"files {', '.join(sharing[:-1])} and {sharing[-1]}" if others else f"file {file.name}"
        more = f" of {file.name}; {', '.join(others)} names it too" if others else ""
        cause = "weights cannot be read from the location that the graph names"
        fault = Fault("error", (problem.tensor, *others), cause, Advice("caller", _advise(problem)), file=file.name)
        fault = fault.compare(declared, problem.detail + more)
        yield fault.also(where=f"{graphs}, external data {problem.location!r}")


def _advise(problem: ExternalProblem) -> str:
    """What to do next: it is the file that is wrong, its place, or what the model says of it."""
    if problem.wrong == "place":
        return "move the file itself into the model's folder, and make its name there the location in the model"
    if problem.wrong == "entry":
        return "the entry in the model is wrong, whatever the file holds: fetch the model again, or save it anew"
    return f"fetch or restore {problem.location!r} in the folder of the model, or save it again"
