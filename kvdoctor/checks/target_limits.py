"""The file asks for more than a target takes: its IR version, its opset, or an operator.

What it means: every release of onnxruntime has a largest IR version and a largest opset of ONNX that it opens, and
knows so many operators and attributes beyond the standard. A current exporter, or a tool that saved the file again,
writes numbers that older runtimes refuse, often without any need of them.

How it is decided: by a table that was measured by opening small models in every release (docs/targets.md), against
each `--target`; without one against the installed runtime where that refuses the file, and in an inspection against the
newest in the table. A release beyond the table is asked itself where it is run. Where the target is run, the run
decides: what it opens is not held against the file.

Reproduce: `kvdoctor inspect MODEL --target onnxruntime==1.16.3`, or open the file with that release.

Repair: `kvdoctor re-export MODEL -o FIXED --target ...` lowers IR version and opset as far as what the graph uses
allows, and proves the copy under the target. What cannot be lowered is named, with the export that would bring it.

Source: ONNX Runtime, docs/Versioning.md, for the rule; the numbers are measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvdoctor.case import Case, first_and_count
from kvdoctor.findings import Fault, check
from kvdoctor.stacks import OnnxFile
from kvdoctor.targets import Target, of_release
from kvdoctor.targets.demands import Demands, demands
from kvdoctor.targets.limits import Limits, newest
from kvdoctor.targets.stay import Stay
from kvdoctor.targets.words import operator_of, words_of


@dataclass(frozen=True, slots=True)
class Excess:
    """A file that asks a target for more than it takes; `text` is what the target said to it, None if not asked."""

    file: str
    target: Target
    demands: Demands
    limits: Limits
    text: str | None


def is_ruled_out(file: OnnxFile, limits: Limits | None) -> bool:
    """Whether the table says that a release does not open a file."""
    if file.view is None or limits is None:
        return False
    asked = demands(file.view)
    return asked.ir > limits.ir or asked.opset > limits.opset or bool(asked.lacking(limits))


@check("KV401", "ir-too-new", "targets")
def ir_too_new(case: Case) -> Iterator[Fault]:
    """The IR version is newer than a target takes."""
    found = _excesses(case, lambda asked, limits: asked.ir > limits.ir)
    what = f"IR version {max((excess.demands.ir for excess in found), default=0)}"
    yield from _fault(case, found, what, lambda excess: f"takes up to {excess.limits.ir}", confirmed=True)


@check("KV402", "opset-too-new", "targets")
def opset_too_new(case: Case) -> Iterator[Fault]:
    """The opset is newer than a target takes."""
    found = _excesses(case, lambda asked, limits: asked.opset > limits.opset)
    what = f"opset {max((excess.demands.opset for excess in found), default=0)}"
    yield from _fault(case, found, what, lambda excess: f"takes up to {excess.limits.opset}")


@check("KV403", "operator-unsupported", "targets")
def operator_unsupported(case: Case) -> Iterator[Fault]:
    """The graph has an operator, or an attribute of one, that a target does not know on the CPU."""
    found = _excesses(case, lambda asked, limits: bool(asked.lacking(limits)))
    names = tuple(dict.fromkeys(name for excess in found for name in _lacking(excess)))
    what = first_and_count(names) if names else ""
    lacking = sorted({name for excess in found for name in excess.demands.lacking(excess.limits)})
    for fault in _fault(case, found, what, lambda excess: f"has no {', no '.join(_lacking(excess))}"):
        yield replace(fault, apart=(*fault.apart, *lacking))


def _lacking(excess: Excess) -> tuple[str, ...]:
    """What a target lacks, in words; an attribute of an operator that is itself unknown is no news."""
    names = excess.demands.lacking(excess.limits).keys()
    return tuple(words_of(name) for name in names if operator_of(name) == name or operator_of(name) not in names)


def _fault(
    case: Case, found: list[Excess], what: str, takes: Callable[[Excess], str], confirmed: bool = False
) -> Iterator[Fault]:
    """One finding for all files and targets."""
    if not found:
        return
    files = tuple(dict.fromkeys(excess.file for excess in found))
    targets = {excess.target: excess for excess in found}
    refused = next((excess for excess in found if excess.text is not None), None)
    observed = [f"{first_and_count(files)}: {what}"]
    observed += [f"{target.words} {takes(excess)}" for target, excess in targets.items()]
    named = first_and_count(tuple(target.words for target in targets))
    yield Fault(
        severity="error",
        file=case.decode_file if case.decode_file in files else files[0],
        subject=files,
        where=f"file {first_and_count(files)}",
        apart=tuple(target.asked for target in targets if target in case.targets),
        promised=f"a model for {named}",
        observed="; ".join(observed),
        cause=f"{what}: too new for {named}",
        advice=case.re_export("lowers the file as far as what it uses allows, and says what stands against it"),
        follows=(f"{refused.target.words} refuses the file: {refused.text}",) if refused is not None else (),
        confidence="confirmed" if confirmed or refused is not None else "suspected",
    )


def _excesses(case: Case, exceeds: Callable[[Demands, Limits], bool]) -> list[Excess]:
    """The files that ask for too much, by target; what a target opened all the same is left out."""
    assert case.stack is not None  # noqa: S101 - asked only where there is a stack
    views = {file.name: file.view for file in case.stack.files.values() if file.view is not None}
    asked = {name: demands(view) for name, view in views.items()}
    found = []
    for target, stay in _held_against(case):
        limits = target.limits
        for name, wanted in asked.items():
            if limits is None or not exceeds(wanted, limits):
                continue
            text = stay.refused(name) if stay is not None else None
            is_open = stay is not None and text is None and (stay.here or stay.took_steps)
            if not is_open:
                found.append(Excess(name, target, wanted, limits, text))
    return found


def _held_against(case: Case) -> Iterator[tuple[Target, Stay | None]]:
    """The targets, each with what was run under it: those that were asked for, else the runtime that is here."""
    stays = {stay.target.asked: stay for stay in case.stays if stay.not_run is None}
    if case.targets:
        for target in case.targets:
            stay = stays.get(target.asked)
            yield (stay.target if stay is not None else target), stay  # one that was run may have been measured there
    elif case.here is not None:
        yield case.here, Stay(case.here, case.runs, case.refusals, here=True)
    else:
        yield of_release(newest().release), None
