"""One entry on which a config and the graph disagree, and how it is put into words."""

from collections.abc import Iterable
from json import dumps

from kvdoctor.diagnose.context import ContractContext
from kvdoctor.records import record

LONGEST_NAME = 80
MOST_SHOWN = 8


@record
class Disagreement:
    """A key of a config, its value there, what the graph shows, the right value, and `so`, the consequence."""

    key: str
    declared: str
    observed: str
    right: str
    so: str = ""


def quoted(name: str) -> str:
    """A name in quotes, in ASCII and of limited length: it is data."""
    return dumps(name[:LONGEST_NAME])


def plain(name: str) -> str:
    """The same without the quotes."""
    return quoted(name)[1:-1]


def either(sizes: Iterable[int]) -> str:
    """`2 or 4`."""
    return " or ".join(map(str, sorted(sizes)))


def span(layers: set[int]) -> str:
    """`0 to 5`, or the numbers where some are left out."""
    numbers = sorted(layers)
    whole = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers[:MOST_SHOWN]))


def on_disk(context: ContractContext, name: str) -> bool:
    """Whether a file is there, in the folder or the one around it. What cannot be looked up counts as there."""
    root = context.folder.root
    try:
        return any((folder / name).exists() for folder in (root, root / "onnx", root.parent))
    except (OSError, ValueError):
        return True
