"""Findings: what a check reports, and the registry of checks.

A check is one file under `diagnose/checks/`: a docstring that explains the fault, and a function with the `check`
decorator. Its code, name and text come from there and nowhere else. `diagnose.run_checks` runs the checks.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from kvdoctor import addons
from kvdoctor.choices import FailOn, Required
from kvdoctor.decode.runs import Run
from kvdoctor.errors import did_you_mean
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.diagnose import context

Severity = Literal["note", "warning", "error"]
Confidence = Literal["confirmed", "suspected"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
Round = Literal["file", "contract", "targets", "runs", "golden", "speed", "caller"]
"""When a check runs. Each round has a context of its own (`diagnose.context`)."""

CHECKS = "kvdoctor.diagnose.checks"
"""The checks of the core; an add-on has some in a package `checks` of its own."""


@record
class Advice:
    """Who fixes a fault and how: kvdoctor in the graph, another export, or the caller's loop."""

    kind: Literal["graph", "re-export", "caller"]
    text: str
    command: str | None = None

    @property
    def instead(self) -> str:
        """The text without the `or` that stands before it where a command comes first."""
        return self.text.removeprefix("or, ").removeprefix("or ")


@record
class Fault:
    """What a check found; `diagnose.run_checks` completes it to a finding. `compare` and `also` add to it.

    Attributes:
        file: The file; by default the one that the check was given, or that decodes.
        where: The place; by default the subject (`output logits`, `file decoder.onnx`) and the experiment of the run.
        run: The run that shows it.
        error: The message of the runtime that `observed` quotes.
        effects: Consequences, which are not reported as faults of their own.
        evidence: What the location of the fault showed.
        use: The documented use that does not work: for a user who requires it the fault is an error.
        apart: Separates faults of one check with the same subject, by an experiment or a target
            (`diagnose.run_checks`).
        nodes: The nodes that it names, each by its name in the graph, or by the first value that it makes.
    """

    severity: Severity
    subject: tuple[str, ...]
    cause: str
    repair: Advice
    declared: str = ""
    observed: str = ""
    where: str = ""
    run: Run | None = None
    error: str | None = None
    effects: tuple[str, ...] = ()
    file: str | None = None
    confidence: Confidence = "confirmed"
    use: Required | None = None
    evidence: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    def compare(self, declared: str, observed: str, **more: Any) -> "Fault":
        """The fault with what was to be, and what is."""
        return replace(self, declared=declared, observed=observed, **more)

    def also(self, **more: Any) -> "Fault":
        """The fault with other fields."""
        return replace(self, **more)


Faults = Iterator[Fault]
"""What a check yields."""


@record
class NodeSource:
    """Where a node comes from in the source of the exported model, where the exporter recorded it.

    `module` is the dotted path of its PyTorch module, empty for the model itself, `kind` the class of that module, and
    `line` the line of Python: `llama/modeling_llama.py:245 forward`. Each is None where it is not known.
    """

    node: str
    module: str | None
    kind: str | None
    line: str | None


@record
class KnownFinding:
    """Why a team accepts a finding, and the last day on which it does, such as 2026-12-31; None for no end."""

    reason: str
    until: str | None = None

    def __str__(self) -> str:
        """Both in one line."""
        return self.reason if self.until is None else f"until {self.until}: {self.reason}"


@record
class Issue:
    """A public issue of another project: its address, a title, and the release that fixes it.

    `fixed_in` is None where no release is known to fix it.
    """

    url: str
    title: str
    fixed_in: str | None


@record
class Finding:
    """A fault with the code and name of its check, the stack and the file.

    Attributes:
        subject: the names of what is wrong: inputs, outputs, nodes, tensors, files, experiments.
        ports: those of the subject that are inputs or outputs.
        slots: the slots of these ports, each by its past input.
        nodes: the nodes at fault.
        experiment: the run that shows it; null where the file alone does.
        step: the step of that run that fails or differs.
        past_length: the length of the past that this step was fed, in tokens.
        new_tokens: the number of its new tokens.
        error: the message of the runtime that `observed` quotes.
        predicted: whether it was derived from the graph, without a run.
        sources: where the nodes come from in the source of the model.
        issues: public issues of other projects that may be its cause.
        known: why the baseline of a gate contains it: it is reported, and does not count.
    """

    code: str
    name: str
    severity: Severity
    confidence: Confidence
    stack: str | None
    file: str | None
    subject: tuple[str, ...]
    where: str
    declared: str
    observed: str
    cause: str
    effects: tuple[str, ...]
    repair: Advice
    fingerprint: str = ""
    use: Required | None = None
    evidence: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    experiment: str | None = None
    step: int | None = None
    past_length: int | None = None
    new_tokens: int | None = None
    error: str | None = None
    predicted: bool = False
    sources: tuple[NodeSource, ...] = ()
    issues: tuple[Issue, ...] = ()
    known: KnownFinding | None = None


Absence = Literal["not-run", "not-selected", "explained", "cannot-check"]
"""Why there is no result: nobody asked for the run, the selection leaves it out, another finding explains it, or no
answer is possible (a limit, a crash, a result between noise and fault)."""


@record
class NotChecked:
    """Why a check or an experiment has no result (`diagnose.not_checked` decides that).

    Attributes:
        stack: the stack; null where it is so for all of them.
        code: the check, or several (`KV401-KV403`, `*`), or the name of an experiment.
        reason: why.
        essential: no model is called healthy without it.
        kind: the kind of the reason.
    """

    stack: str | None
    code: str
    reason: str
    essential: bool = False
    kind: Absence = "cannot-check"


@record
class Check:
    """A registered check, with one function for each round in which it runs.

    `incomplete` says that its finding means: the model was not diagnosed. `needs` are experiments that do not always
    run, at least one of which the check depends on.
    """

    code: str
    name: str
    functions: Mapping[Round, Callable[[Any], Faults]]
    incomplete: bool
    needs: tuple[str, ...]

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds in which it runs."""
        return tuple(self.functions)

    @property
    def module(self) -> str:
        """The name of the module that defines the check."""
        return next(iter(self.functions.values())).__module__

    @property
    def documentation(self) -> str:
        """The docstring of its module; where that defines several checks, with the summary and sections of its own."""
        sections = _split_sections(self._module_text) | _split_sections(self._own_text)
        return "\n\n".join([self.summary, *(text for label, text in sections.items() if label)])

    @property
    def summary(self) -> str:
        """The first line of its documentation."""
        return self._own_text.partition("\n")[0]

    @property
    def _module_text(self) -> str:
        return inspect.cleandoc(importlib.import_module(self.module).__doc__ or "")

    @property
    def _own_text(self) -> str:
        """The docstring of its function, where its module defines several checks."""
        alone = sum(one.module == self.module for one in _REGISTERED.values()) == 1
        function = next(iter(self.functions.values()))
        return self._module_text if alone else inspect.cleandoc(function.__doc__ or "")


SECTIONS = ("What it means", "How it is decided", "Reproduce", "Repair", "Source")
"""The sections of a check's documentation, in their order."""


def _split_sections(text: str) -> dict[str, str]:
    """The paragraphs of a docstring by the section in which they are; what is before the first one under ""."""
    found: dict[str, str] = {}
    label = ""
    for paragraph in text.split("\n\n"):
        label = next((one for one in SECTIONS if paragraph.startswith(one)), label)
        found[label] = f"{found[label]}\n\n{paragraph}" if label in found else paragraph
    return found


_REGISTERED: dict[str, Check] = {}
C = TypeVar("C")
Register = Callable[[Callable[[C], Faults]], Callable[[C], Faults]]


@overload
def check(
    code: str, name: str, when: Literal["file"], *, incomplete: bool = ...
) -> "Register[context.FileContext]": ...
@overload
def check(code: str, name: str, when: Literal["contract"]) -> "Register[context.ContractContext]": ...
@overload
def check(
    code: str, name: str, when: Literal["runs", "targets"], *, incomplete: bool = ..., needs: tuple[str, ...] = ...
) -> "Register[context.RunContext]": ...
@overload
def check(code: str, name: str, when: Literal["golden"]) -> "Register[context.GoldenContext]": ...
@overload
def check(code: str, name: str, when: Literal["speed"]) -> "Register[context.SpeedContext]": ...
@overload
def check(code: str, name: str, when: Literal["caller"]) -> Register[Any]: ...
def check(code: str, name: str, when: Round, *, incomplete: bool = False, needs: tuple[str, ...] = ()) -> Register[Any]:
    """Register a function as the check of that code and name in one round.

    A check that runs in two rounds has two functions in the same module, both registered under its code. Write `when`
    as a literal: the modules of a round are found by that text, and the others are not loaded.
    """

    def register(function: Callable[[Any], Faults]) -> Callable[[Any], Faults]:
        known = _REGISTERED.get(code) or next((one for one in _REGISTERED.values() if one.name == name), None)
        if known is None:
            _REGISTERED[code] = Check(code, name, {when: function}, incomplete, needs)
        elif (known.code, known.name, known.module) != (code, name, function.__module__) or when in known.functions:
            raise ValueError(f"check {code} {name} is registered twice")
        else:
            _REGISTERED[code] = replace(known, functions={**known.functions, when: function})
        return function

    return register


@cache
def all_checks() -> tuple[Check, ...]:
    """Every check, by code: those of `diagnose/checks/` and of the add-ons."""
    for module in _find_check_modules():
        importlib.import_module(module)
    return tuple(_REGISTERED[code] for code in sorted(_REGISTERED))


@cache
def checks_of(when: Round) -> tuple[Check, ...]:
    """The checks of one round, by code. Only their modules are loaded: an inspection needs a third of them."""
    for module in _find_check_modules(f'"{when}"'):
        importlib.import_module(module)
    return tuple(one for _, one in sorted(_REGISTERED.items()) if when in one.functions)


def _find_check_modules(text: str = "") -> Iterator[str]:
    for package in (CHECKS, *(module.__name__ for module in addons.modules("checks"))):
        yield from find_modules(package, text)


def find_modules(package: str, text: str = "") -> Iterator[str]:
    """The names of a package's modules whose source contains a text, in order; nothing is loaded but the package.

    A module of which only the bytecode is installed is taken to contain it.
    """
    for module in _list_modules(package):
        source = _read_source(package, module) if text else None
        if source is None or text.encode() in source:
            yield f"{package}.{module}"


@cache
def _list_modules(package: str) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]


@cache
def _read_source(package: str, module: str) -> bytes | None:
    try:
        return pkgutil.get_data(package, f"{module}.py")
    except OSError:
        return None


def reaches(finding: "Finding", fail_on: FailOn) -> bool:
    """Whether a finding is severe and certain enough to count as a failure (`choices.FailOn`); none is for `never`."""
    if fail_on == "never":
        return False
    severity, _, certainty = fail_on.partition(":")
    lowest = [str(one) for one in SEVERITIES].index(severity)
    if finding.confidence == "suspected" and certainty:
        lowest = len(SEVERITIES) if certainty == "confirmed" else lowest - 1
    return SEVERITIES.index(finding.severity) >= lowest


def means_incomplete(code: str) -> bool:
    """Whether a finding of that check means that the model was not diagnosed."""
    if code in _REGISTERED:
        return _REGISTERED[code].incomplete
    return any(one.incomplete for one in all_checks() if one.code == code)


def find_check(wanted: str) -> Check | None:
    """The check of that code or name: of a module with it in the source, and all are loaded only where none has it."""
    code, name = wanted.upper(), wanted.lower()
    for module in (*_find_check_modules(f'"{code}"'), *_find_check_modules(f'"{name}"')):
        importlib.import_module(module)
    known = (one for checks in (_REGISTERED.values, all_checks) for one in checks())
    return next((one for one in known if code == one.code or name == one.name), None)


@record
class Selection:
    """Which checks count, by code, code prefix or name; nothing selected means all of them."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, code: str, name: str) -> bool:
        """Whether a check is selected and not ignored."""
        return (not self.select or _matches(self.select, code, name)) and not _matches(self.ignore, code, name)


def why_no_check(wanted: Iterable[str]) -> str | None:
    """Why one of the texts names no check (a code, the start of codes, or a name); None where each names some."""
    for word in wanted:
        if not any(_matches((word,), check.code, check.name) for check in all_checks()):
            meant = did_you_mean(word, (name for check in all_checks() for name in (check.code, check.name)))
            return f"{word!r} names no check; {meant}{' ' * bool(meant)}`kvdoctor explain` lists all of them"
    return None


def names_open_check(word: str, code: str) -> bool:
    """Whether a text stands for the code of a `NotChecked` or a finding: it is one, its prefix or its name."""
    if code == "*" or "-" in code:
        return word.upper() == code or (code == "*" and word == "everything")
    check = find_check(code)
    return check is not None and _matches((word,), check.code, check.name)


def _matches(wanted: tuple[str, ...], code: str, name: str) -> bool:
    return any(code.startswith(word.upper()) or word.lower() == name for word in wanted)
