"""The section of evidence/faults.md on the generated decoders, which `evidence/faults/make_page.py` writes."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .faults import KINDS
from .measure import SILENT, Case, Said

TITLE = "## Generated decoders"
HEAD = """{title}

Decoders written node by node by `evidence/generated`, each with a fault of one kind, and what a step-test says of them
by default. A kind is put into some of the bases (layouts of the cache, positions, masks, files) that can have it.
Written by `python -m evidence.faults.make_page --generated RESULTS`, from what
`python -m evidence.generated.measure --bases {bases} --record RESULTS` measured.

*found*: an error or a warning. *named*: the leading finding says what is wrong, or where it strikes: at some lengths,
in chunks, in which half of a step. *called*: the leading findings.

{summary}

| kind | bases | found | named | called |
| --- | --- | --- | --- | --- |
"""
SILENT_HEAD = """
### Not found

| kind | base | reason |
| --- | --- | --- |
"""
MISNAMED_HEAD = """
### Called otherwise

| kind | base | called |
| --- | --- | --- |
"""


def read_results(paths: list[Path]) -> list[Said]:
    """What was measured, the latest of each case, in the order of the kinds."""
    found = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            case = Case(**entry.pop("case"))
            found[case] = Said(case, **entry)
    order = list(KINDS)
    faulty = [said for said in found.values() if not said.case.healthy and said.case.kind in KINDS]
    faulty.sort(key=lambda said: order.index(said.case.kind))
    return [*faulty, *(said for said in found.values() if said.case.healthy)]


def section(all_said: list[Said]) -> str:
    """The section as text.

    Raises:
        ValueError: a kind was not measured, is silent without a reason, or a healthy decoder is called faulty.
    """
    faulty = [said for said in all_said if not said.case.healthy]
    by_kind = {kind: [said for said in faulty if said.case.kind == kind] for kind in KINDS}
    if problems := list(_problems(all_said, by_kind)):
        raise ValueError("\n".join(problems))
    head = HEAD.format(title=TITLE, bases=max(map(len, by_kind.values())), summary=_summary(all_said))
    rows = [_row(kind, said) for kind, said in by_kind.items()]
    silent = [_line(s.case.kind, s.case.base, SILENT[s.case.kind]) for s in faulty if not s.found]
    other = [_line(s.case.kind, s.case.base, s.leading) for s in faulty if s.found and not s.acceptable]
    lists = ((SILENT_HEAD, silent), (MISNAMED_HEAD, other))
    return head + "\n".join(rows) + "\n" + "".join(title + "\n".join(lines) + "\n" for title, lines in lists if lines)


def kinds_on(text: str) -> list[str]:
    """The kinds in the table of a page that has the section."""
    table = text.partition(TITLE)[2].partition("\n### ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [line.strip("| ").partition(" | ")[0] for line in lines[2:]]


def _problems(all_said: list[Said], by_kind: dict[str, list[Said]]) -> Iterator[str]:
    for kind, said in by_kind.items():
        if not said:
            yield f"not measured: {kind}"
        yield from (f"silent without a reason: {one}" for one in said if not one.found and kind not in SILENT)
    yield from (f"false alarm: {one}" for one in all_said if one.alarm)


def _summary(all_said: list[Said]) -> str:
    faulty = [said for said in all_said if not said.case.healthy]
    right = [said for said in all_said if said.case.healthy]
    found, named = sum(said.found for said in faulty), sum(said.acceptable for said in faulty)
    exact = sum(said.exact for said in faulty)
    bases, changes = len({said.case.base for said in right}), len({said.case.kind for said in right})
    return (
        f"{len(faulty)} faulty decoders of {len(KINDS)} kinds on {len({said.case.base for said in faulty})} bases: "
        f"{found} found, {len(faulty) - found} silent; {named} named ({100 * named / len(faulty):.1f} in 100), "
        f"{exact} of them by more than cached-differs. {len(right)} healthy ones, {bases} bases with {changes} "
        f"harmless changes: no false alarm."
    )


def _row(kind: str, said: list[Said]) -> str:
    called = Counter(one.leading for one in said if one.found)
    words = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in called.most_common())
    counts = (f"{sum(flags)} of {len(said)}" for flags in ([s.found for s in said], [s.acceptable for s in said]))
    return _line(kind, ", ".join(one.case.base for one in said), *counts, words)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
