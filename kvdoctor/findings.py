"""Findings, and the frame in which checks run.

A check is one file under `checks/`: a docstring that explains the fault, and a function with the `check` decorator.
Its code, name and text come from there and nowhere else.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from kvdoctor.choices import Required
from kvdoctor.fingerprints import Place, fingerprint, numbered

if TYPE_CHECKING:
    from kvdoctor.case import Case

Severity = Literal["note", "warning", "error"]
Confidence = Literal["confirmed", "suspected"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
Asks = Literal["file", "contract", "runs", "caller", "targets"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Who mends a fault and how: the graph by kvdoctor, the export, or the caller's loop."""

    kind: Literal["graph", "re-export", "caller"]
    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """What a check found, before the frame adds the check's own code and name.

    `follows` are the consequences, which are not reported as faults of their own; `because` says what the place of the
    fault showed. `use` is the documented use that it denies: whoever requires that gets an error. `apart` tells it from
    other faults of its check with the same subject, in words that stay the same (`fingerprints`): an experiment, a
    target.
    """

    severity: Severity
    subject: tuple[str, ...]
    where: str
    promised: str
    observed: str
    cause: str
    advice: Advice
    follows: tuple[str, ...] = ()
    file: str | None = None
    confidence: Confidence = "confirmed"
    use: Required | None = None
    because: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """Why a team lives with a finding, and the last day on which it is known, as in 2026-12-31; None for no end."""

    reason: str
    until: str | None = None

    def __str__(self) -> str:
        """Both in one line."""
        return self.reason if self.until is None else f"until {self.until}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault with the code and name of its check, the stack and the file.

    `known` says that the baseline of a gate holds it: it is told like any other, and does not count.
    """

    code: str
    name: str
    severity: Severity
    confidence: Confidence
    stack: str | None
    file: str | None
    subject: tuple[str, ...]
    where: str
    promised: str
    observed: str
    cause: str
    follows: tuple[str, ...]
    repair: Advice
    fingerprint: str = ""
    use: Required | None = None
    because: tuple[str, ...] = ()
    known: Known | None = None


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A check that could not run, and why. `essential`: without it no model is called healthy."""

    stack: str | None
    code: str
    reason: str
    essential: bool = False


class CannotCheck(Exception):
    """Raised by a check whose question cannot be answered here."""


@dataclass(frozen=True, slots=True)
class Check:
    """A registered check. `asks` are the rounds it is asked in; `incomplete` that its finding means: not diagnosed.

    `needs` are experiments that are not always run, and without which it has nothing to go by; one of them will do.
    """

    code: str
    name: str
    asks: tuple[Asks, ...]
    incomplete: bool
    needs: tuple[str, ...]
    function: "Callable[[Case], Iterator[Fault]]"

    @property
    def documentation(self) -> str:
        """The docstring of its module."""
        return inspect.cleandoc(importlib.import_module(self.function.__module__).__doc__ or "")

    @property
    def summary(self) -> str:
        """The first line of its documentation; where a module holds several checks, that of its own function."""
        alone = sum(one.function.__module__ == self.function.__module__ for one in _REGISTERED.values()) == 1
        text = self.documentation if alone else inspect.cleandoc(self.function.__doc__ or "")
        return text.partition("\n")[0]


_REGISTERED: dict[str, Check] = {}


def check(
    code: str, name: str, *asks: Asks, incomplete: bool = False, needs: tuple[str, ...] = ()
) -> "Callable[[Callable[[Case], Iterator[Fault]]], Callable[[Case], Iterator[Fault]]]":
    """Register a function as the check of that code and name."""

    def register(function: "Callable[[Case], Iterator[Fault]]") -> "Callable[[Case], Iterator[Fault]]":
        if code in _REGISTERED or any(known.name == name for known in _REGISTERED.values()):
            raise ValueError(f"check {code} {name} is registered twice")
        _REGISTERED[code] = Check(code, name, asks, incomplete, needs, function)
        return function

    return register


@cache
def all_checks() -> tuple[Check, ...]:
    """Every check under `checks/`, by code."""
    package = importlib.import_module("kvdoctor.checks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"kvdoctor.checks.{module.name}")
    return tuple(_REGISTERED[code] for code in sorted(_REGISTERED))


def find_check(wanted: str) -> Check | None:
    """The check of that code or name."""
    return next((c for c in all_checks() if wanted.upper() == c.code or wanted.lower() == c.name), None)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which checks count, by code, code prefix or name; nothing selected means all of them."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, code: str, name: str) -> bool:
        """Whether a check is selected and not ignored."""
        if self.select and not _named(self.select, code, name):
            return False
        return not _named(self.ignore, code, name)


def why_no_check(words: Iterable[str]) -> str | None:
    """Why one of the words names no check, be it a code, the start of codes or a name; None where each names some."""
    for word in words:
        if not any(_named((word,), check.code, check.name) for check in all_checks()):
            return f"{word!r} names no check; `kvdoctor explain` lists all of them"
    return None


def _named(wanted: tuple[str, ...], code: str, name: str) -> bool:
    return any(code.startswith(word.upper()) or word.lower() == name for word in wanted)


@dataclass
class Verdicts:
    """What a round of checks brought."""

    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)


def run_checks(case: "Case", asks: Asks, selection: Selection, verdicts: Verdicts) -> None:
    """Run the selected checks that ask for `asks` on a case. A check that raises is reported, not lost."""
    for one in all_checks():
        if asks not in one.asks:
            continue
        stack = case.stack.name if case.stack else None
        if selection.takes(one.code, one.name):
            _run_check(one, case, stack, verdicts)
        elif one.incomplete:
            # Who leaves out such a check must still not hear that a model is healthy which was not diagnosed.
            hidden = Verdicts()
            _run_check(one, case, stack, hidden)
            verdicts.not_checked += [
                NotChecked(f.stack, f.code, f"{f.where}: {f.cause}", essential=True) for f in hidden.findings
            ]


def _run_check(one: Check, case: "Case", stack: str | None, verdicts: Verdicts) -> None:
    try:
        for fault in one.function(case):
            required = fault.use in case.required
            verdicts.findings.append(_finding(one, replace(fault, severity="error") if required else fault, case))
    except CannotCheck as reason:
        verdicts.not_checked.append(NotChecked(stack, one.code, str(reason)))
    except Exception as error:  # one broken check must not hide what the others found
        text = f"the check crashed ({type(error).__name__}: {error}); please report it"
        verdicts.not_checked.append(NotChecked(stack, one.code, text, essential=True))


def told_apart(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings of one model, each with a fingerprint of its own."""
    by_name = sorted(range(len(findings)), key=lambda at: (findings[at].stack or "", findings[at].file or "", at))
    distinct = dict(zip(by_name, numbered([findings[at].fingerprint for at in by_name]), strict=True))
    return tuple(replace(finding, fingerprint=distinct[at]) for at, finding in enumerate(findings))


def fault_found(name: str, fault: Fault) -> Finding:
    """The finding of a fault that met the diagnosis of a whole model from outside, under the check of that name."""
    one = find_check(name)
    if one is None:
        raise LookupError(f"there is no check {name}")
    return _made(one, fault, None, Place(None, None, ()))


def _finding(one: Check, fault: Fault, case: "Case") -> Finding:
    files = (*case.folder.files, *(case.stack.files.values() if case.stack else ()))
    named = next((file for file in files if file.name == fault.file), None)
    file = named or case.file or (case.stack.main if case.stack else None)
    return _made(one, fault, case.stack.name if case.stack else None, Place(file, case.stack, files))


def _made(one: Check, fault: Fault, stack: str | None, place: Place) -> Finding:
    return Finding(
        code=one.code,
        name=one.name,
        severity=fault.severity,
        confidence=fault.confidence,
        stack=stack,
        file=fault.file,
        subject=fault.subject,
        where=fault.where,
        promised=fault.promised,
        observed=fault.observed,
        cause=fault.cause,
        follows=fault.follows,
        repair=fault.advice,
        use=fault.use,
        because=fault.because,
        fingerprint=fingerprint(one.name, fault.subject, fault.apart, place),
    )
