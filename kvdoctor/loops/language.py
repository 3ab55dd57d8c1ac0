"""What a language is to the writer of loops: its templates, and the commands that build and run the project."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

from kvdoctor.errors import KvdoctorError
from kvdoctor.loops.plan import LoopPlan
from kvdoctor.records import record


def takes_all(plan: LoopPlan) -> str | None:  # noqa: ARG001
    """A language whose binding has all that any plan needs."""
    return None


def needs_nothing(cache: Path) -> Mapping[str, str]:  # noqa: ARG001
    """A language whose tools fetch all that a project needs."""
    return {}


class CannotBuild(KvdoctorError):
    """A project could not be built here, which says nothing about the loop: the message has the reason."""


@record
class Language:
    """One folder of `languages/`.

    Attributes:
        name: As `--language` has it.
        title: As people write it.
        files: The files of the project, each with its template beside the language's module.
        filters: What its templates use beside the plan.
        build: Commands that build the project, run in its folder, in order.
        run: The command that runs the program, run in its folder; arguments follow.
        tools: Programs that must be installed.
        environment: Variables for building and running; `{onnxruntime}` stands for the runtime's shared library,
            `{cache}` for a folder where builds may keep what later ones use.
        prepare: Fetches what the tools of the language do not, into that folder; returns further variables.
        refuses: Says why there is no loop for a plan in this language, or None.
        probe_files: Files that only a project with a probe has, each with its template.
    """

    name: str
    title: str
    files: Mapping[str, str]
    filters: Mapping[str, Callable[..., Any]]
    build: tuple[tuple[str, ...], ...]
    run: tuple[str, ...]
    tools: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], Mapping[str, str]] = needs_nothing
    refuses: Callable[[LoopPlan], str | None] = takes_all
    probe_files: Mapping[str, str] = field(default_factory=dict)


@cache
def languages() -> dict[str, Language]:
    """All languages by name: each folder of `languages/` defines one."""
    from kvdoctor.loops import languages as folder

    found = (importlib.import_module(f"{folder.__name__}.{one.name}") for one in pkgutil.iter_modules(folder.__path__))
    return {module.LANGUAGE.name: module.LANGUAGE for module in found}
