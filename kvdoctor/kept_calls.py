"""The feeds of a call on disk, so that another graph can be given the same ones. numpy only.

Names from a model are data: they go into a list of their own, and the arrays are numbered.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvdoctor.calls import Array, Value, as_array


def save_call(path: Path, feeds: "Mapping[str, Value | Array]") -> None:
    """Write the feeds of a call, one array for each input."""
    arrays = {f"feed{index}": as_array(value) for index, value in enumerate(feeds.values())}
    np.savez(path, names=np.array(list(feeds), dtype=np.str_), **arrays)  # type: ignore[arg-type]


def load_call(path: Path) -> dict[str, Array]:
    """Read the feeds of a call."""
    with np.load(path) as kept:
        return {str(name): kept[f"feed{index}"] for index, name in enumerate(kept["names"])}
