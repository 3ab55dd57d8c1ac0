"""A copy with an older IR version or opset, where one was asked for by number."""

from kvdoctor.cure.splicing import write_model
from kvdoctor.cure.treatment import Applied
from kvdoctor.layouts import Conversion
from kvdoctor.lowering import Wanted, lower
from kvdoctor.lowering.files import asks_more
from kvdoctor.model_folder import ModelFolder
from kvdoctor.report.document import Change
from kvdoctor.skeleton import read_skeleton

LOWERED = Conversion("lowered", "IR version and opset are lowered to the numbers asked for.")


def lower_copy(folder: ModelFolder, want: Wanted) -> list[Applied]:
    """Lower the files of every stack in place, in a folder of our own; gives what was changed.

    Raises:
        CannotLower: something that a model uses needs more.
        OSError: a file cannot be written.
    """
    done, applied = set[str](), []
    for stack in folder.stacks:
        changes: list[Change] = []
        for file in stack.files.values():
            if file.name in done or file.view is None or not asks_more(file.view, want):
                continue
            done.add(file.name)
            model = read_skeleton(file.path, located=True).model
            changes += lower(model, want, file.name)
            write_model(model, file.path, file.path)
        if changes:
            applied.append(Applied(stack.name, LOWERED, tuple(changes)))
    return applied
