"""Writes a plan as a project: the files of a language, by their names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jinja2

from kvdoctor._version import __version__
from kvdoctor.loops.language import Language
from kvdoctor.loops.plan import LoopPlan
from kvdoctor.report.safe import code, markdown


def render(  # noqa: PLR0913 - one for each thing that a template sees
    plan: LoopPlan,
    language: Language,
    contract: Sequence[tuple[str, str]] = (),
    *,
    probe: bool = False,
    external: Mapping[str, Sequence[str]] = MappingProxyType({}),
    example: str = "--prompt 5,6,7",
) -> dict[str, str]:
    """The files of a project, by their paths in it. `contract` is the contract in words, each part with its label.

    With `probe` they have what only a probe needs. `external` are the files that hold the weights of a file, as the
    file names them: a browser cannot list a folder. `example` are arguments of the program that its README shows.

    A template sees the plan and the language's filters. Names of a model reach a program as string literals and as
    text of comments, by the filters `literal` and `comment`, and a README by `code` and `markdown`.
    """
    folder = Path(__file__).parent / "languages"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder / language.name, folder]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - programs, not HTML
    )
    environment.filters |= {"comment": comment, "markdown": markdown, "code": code, **language.filters}
    known = {"plan": plan, "language": language, "version": __version__, "contract": contract}
    known |= {"probe": probe, "external": external, "example": example}
    files = {"README.md": "README.md.j2", **language.files, **(language.probe_files if probe else {})}
    return {name: environment.get_template(template).render(known) for name, template in files.items()}


def comment(text: str) -> str:
    """A name for a comment of any language: letters, digits and a few signs on one line, at most 80 of them."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in " ._-+()") else "?" for c in text)
    return plain if len(plain) <= 80 else plain[:77] + "..."
