"""Add-ons: whole commands on top of the core, each in a folder of its own that can be deleted.

The core imports none of them. It asks this module, which finds what is there: commands and functions for `kvdoctor`,
options, checks, and what a step-test does more. An add-on may import the core, and no other add-on.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType


@cache
def names() -> tuple[str, ...]:
    """The add-ons that are there."""
    return tuple(sorted(one.name for one in pkgutil.iter_modules(__path__) if one.ispkg))


def taken_options(command: str) -> set[str]:
    """What a command of an add-on takes of the core's options; empty for a command of the core."""
    packages = (importlib.import_module(f"{__name__}.{name}") for name in names())
    return {option for package in packages for option in getattr(package, "TAKES", {}).get(command, ())}


def modules(part: str) -> Iterator[ModuleType]:
    """The module of that name of each add-on that has one, such as `commands`."""
    for name in names():
        module = f"{__name__}.{name}.{part}"
        if importlib.util.find_spec(module) is not None:
            yield importlib.import_module(module)
