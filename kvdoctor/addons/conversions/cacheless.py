"""What the core says of a decoder without a cache: the command that gives it one, or what stands in the way."""

from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.errors import as_argument, free_name


def advise(folder: ModelFolder, file: OnnxFile) -> str:
    """The advice in one clause."""
    from kvdoctor.addons.conversions.new_cache.convert import find_obstacle

    reason = find_obstacle(file)
    command = f"kvdoctor convert {as_argument(folder.shown)} --cache growing"
    if reason is None:
        return f"{command} -o {free_name('CACHED')} makes a copy that has one, and proves it"
    return f"{command} would refuse it: {reason}"
