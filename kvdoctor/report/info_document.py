"""The documents of `explain --format json` and `env --format json`. Their field names are the public contract."""

from typing import Any

from kvdoctor._version import __version__
from kvdoctor.findings import Issue
from kvdoctor.records import record, to_plain

EXPLAIN_SCHEMA = "kvdoctor/explain/1"
ENV_SCHEMA = "kvdoctor/env/1"


@record
class ExplainedCheck:
    """What a finding means.

    Attributes:
        code: the code of the check.
        name: its name.
        summary: what it finds, in one line.
        text: the whole explanation, in paragraphs.
        repairs: the graph repairs that `re-export` tries for it.
        issues: public issues of other projects that concern it.
    """

    code: str
    name: str
    summary: str
    text: str
    repairs: tuple[str, ...] = ()
    issues: tuple[Issue, ...] = ()


@record
class ExplainedMessage:
    """A known error message.

    Attributes:
        seen: what is seen.
        question: the question that decides between its causes.
        answer: the command that answers it.
    """

    seen: str
    question: str
    answer: str


@record
class ExplainedName:
    """A name that is no check: its kind (`term`, `experiment`), the name, and what it means."""

    kind: str
    name: str
    text: str


@record
class Explanation:
    """The document of `explain`.

    Attributes:
        checks: the checks that were asked for.
        messages: the known messages that are like the text.
        issues: public issues of other projects whose message is in the text.
        names: terms of the glossary and experiments of that name.
        closest: where nothing is known, the known messages that share most with the text.
    """

    checks: tuple[ExplainedCheck, ...] = ()
    messages: tuple[ExplainedMessage, ...] = ()
    issues: tuple[Issue, ...] = ()
    names: tuple[ExplainedName, ...] = ()
    closest: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return _with_head(EXPLAIN_SCHEMA, to_plain(self))


@record
class Component:
    """Something that kvdoctor uses.

    Attributes:
        state: ok, or what is wrong with it: MISSING, absent, BROKEN; `limits` for what limits a run.
        text: its name and version, and the command that installs it.
    """

    state: str
    text: str

    def __str__(self) -> str:
        """The line in text."""
        return f"{self.state:<8} {self.text}"


@record
class EnvironmentDocument:
    """The document of `env`.

    Attributes:
        python: the version of Python.
        platform: the system and the processor.
        components: everything that kvdoctor uses.
    """

    python: str
    platform: str
    components: tuple[Component, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return _with_head(ENV_SCHEMA, to_plain(self))

    @property
    def head(self) -> str:
        """The first line of the text."""
        return f"kvdoctor {__version__}, Python {self.python}, {self.platform}"

    def __str__(self) -> str:
        """The text: a line for each component."""
        return "\n".join([self.head, *map(str, self.components)])


def _with_head(schema: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"schema": schema, "tool": {"name": "kvdoctor", "version": __version__}, **body}
