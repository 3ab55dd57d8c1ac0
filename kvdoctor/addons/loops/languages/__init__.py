"""The languages that loops are written in, one module each: how the program of a language is built and run."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache
from pathlib import Path

from kvdoctor.addons.loops.plan import LoopPlan
from kvdoctor.errors import KvdoctorError
from kvdoctor.records import record


def takes_all(_plan: LoopPlan) -> str | None:
    """A language whose binding has all that any plan needs."""
    return None


def needs_nothing(_cache: Path) -> Mapping[str, str]:
    """A language whose tools fetch all that a project needs."""
    return {}


class CannotBuild(KvdoctorError):
    """A project could not be built here, which says nothing about the loop: the message has the reason."""


@record
class Language:
    """A language, whose program is a folder of `programs/`.

    Attributes:
        name: As `--language` has it.
        title: As people write it.
        build: Commands that build the project, run in its folder, in order.
        run: The command that runs the program, run in its folder; arguments follow.
        tools: Programs that must be installed.
        environment: Variables for building and running; `{onnxruntime}` stands for the runtime's shared library,
            `{cache}` for a folder where builds may keep what later ones use.
        prepare: Fetches what the tools of the language do not, into that folder; returns further variables.
        refuses: Says why there is no loop for a plan in this language, or None.
        program: The language whose program it has; None where it has one of its own.
    """

    name: str
    title: str
    build: tuple[tuple[str, ...], ...]
    run: tuple[str, ...]
    tools: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], Mapping[str, str]] = needs_nothing
    refuses: Callable[[LoopPlan], str | None] = takes_all
    program: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of its program."""
        return Path(__file__).parent.parent / "programs" / (self.program or self.name)


@cache
def languages() -> dict[str, Language]:
    """All languages by name: each module here defines one."""
    found = (importlib.import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__))
    return {module.LANGUAGE.name: module.LANGUAGE for module in found}
