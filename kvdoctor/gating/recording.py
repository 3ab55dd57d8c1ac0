"""What `kvdoctor baseline` makes of a baseline and a gate: what is taken in, renewed, moved and taken out."""

import os
from dataclasses import dataclass, replace

from kvdoctor.baseline import Baseline, Entry, in_order
from kvdoctor.gating.knowing import Compared, is_of, looked_with, place_of, shape_of
from kvdoctor.report import wording
from kvdoctor.report.document import counts, is_open, means_incomplete


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for: a reason takes in what counts, until a day or for good; `prune` takes out what is no more."""

    reason: str | None = None
    until: str | None = None
    prune: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """The entries as they are to be written, and a line for each that is other than before.

    `left` are lines on what still counts or is stale, `open` the models of which something could not be checked.
    """

    entries: tuple[Entry, ...]
    changes: tuple[str, ...]
    left: tuple[str, ...]
    open: tuple[str, ...]


def recorded(baseline: Baseline, found: Compared, wish: Wish) -> Recorded:
    """The baseline after a gate, as asked. Reasons and days of what is known stay as they are."""
    entries = {(entry.model, entry.fingerprint): entry for entry in baseline.entries}
    changes, left = [], []
    moved = dict(found.told.moved)
    for new, headline in _counting(baseline, found):
        if wish.reason is None:
            left.append(f"counts: {new.model}: {headline}")
            continue
        over = [e for e in found.used if e.fingerprint == new.fingerprint and (e in moved or is_of(e, new.model))]
        for entry in over:
            moved.pop(entry, None)
            entries.pop((entry.model, entry.fingerprint), None)
        entries[new.model, new.fingerprint] = replace(new, reason=wish.reason, until=wish.until)
        changes.append(f"{'renewed' if over else 'taken in'}: {new.model}: {headline}")
    for entry in (*found.told.stale, *_gone(baseline, found)):
        line = f"{entry.words}: {'not found any more' if entry in found.told.stale else 'the model is gone'}"
        if wish.prune:
            del entries[entry.model, entry.fingerprint]
            changes.append(f"taken out: {line}")
        else:
            left.append(f"stale: {line}")
    for entry, path in moved.items():
        if wish.prune or wish.reason is not None:
            del entries[entry.model, entry.fingerprint]
            entries[path, entry.fingerprint] = replace(entry, model=path)
            changes.append(f"moved: {entry.words} to {path}")
        else:
            left.append(f"moved: {entry.words} is at {path} now")
    undone = (report.model.path for report in found.reports if is_open(report.findings, report.not_checked))
    return Recorded(in_order(entries.values()), tuple(changes), tuple(left), tuple(undone))


def _counting(baseline: Baseline, found: Compared) -> list[tuple[Entry, str]]:
    """What counts, as entries without a reason, each with its headline."""
    made = []
    for report in found.reports:
        lowest = report.arguments["fail_on"]
        for finding in report.findings:
            if counts(finding, "error" if lowest == "never" else lowest) and not means_incomplete(finding.code):
                model, shape = place_of(report, baseline.folder), shape_of(report)
                further = looked_with(report, finding.code)
                entry = Entry(model, finding.code, finding.where, "", None, finding.fingerprint, shape, further)
                made.append((entry, wording.headline(finding)))
    return made


def _gone(baseline: Baseline, found: Compared) -> list[Entry]:
    """Entries of models that are nowhere any more; one whose other entry was found elsewhere has moved."""
    moved = {entry.model for entry, _ in found.told.moved}
    here = {*found.used, *found.told.stale, *(entry for entry in baseline.entries if entry.model in moved)}
    return [e for e in baseline.entries if e not in here and not os.path.lexists(baseline.folder / e.model)]
