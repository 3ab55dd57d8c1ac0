"""Writes evidence/proof.md: what is proved of healthy models, what stops the others, and that no fault is proved.

    python -m evidence.proof.make_page [--zoo FOLDER] [--numbers N]

`--zoo` is the folder with the exports of the zoo that were made (`evidence.zoo.make_page --exports`); `--numbers` is
the number of instances of each family of random decoders (2).
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from support.text_fixtures import load_all

from evidence.proof.measure import Drawn, Proved, prove_drawn, prove_faults, prove_folder
from evidence.strangers.families import FAMILIES
from evidence.zoo.making import folder_of
from evidence.zoo.row import Row
from evidence.zoo.tables import ROWS

DOCUMENT = Path(__file__).parents[1] / "proof.md"
FAULTS = 8
"""Faulty decoders that are drawn for each instance."""
ALLOWED = {
    "": "a harmless change",
    **dict.fromkeys(("cached-branch-first", "session-refused"), "the runtime"),
    **dict.fromkeys(("external-data-escapes", "external-data-missing", "graph-unsorted", "invalid-graph"), "the file"),
    "axis-name-collision": "names of axes, not their lengths",
    "batch-axis-frozen": "one batch, which the proof then says nothing of",
    "config-disagrees": "the config",
    "context-limit-fails": "the proof ends before, or the same token is wrong with a cache and without",
    "cross-cache-emptied": "a loop that follows the contract holds the value of the first step",
    "layers-inconsistent": "names or sizes of layers",
    "non-finite": "no numbers, with a cache and without",
    "padding-changes-logits": "rows with padding, which are no part of the proof",
    "sequence-axis-frozen": "the graph takes one new token, for which it is proved",
    "step-fails": "a table ends, and the proof ends there",
}
"""Checks whose faults leave the cache right, and why."""
OF_FIXTURES = {
    **dict.fromkeys(("empty-tensor-hazard", "ir-too-new", "operator-unsupported", "opset-too-new"), "the runtime"),
    **dict.fromkeys(("key-value-swapped", "layers-swapped", "names-mislead"), "names alone"),
    "attention-cache-half-wired": "the runtime, which runs no such step",
    "caller-runtime-differs": "the runtime of a caller",
    "duplicate-weights": "the file",
    "encoder-rows-differ": "the encoder",
    "loop-breaks-contract": "the loop of a caller",
    "mask-not-offset": "the fault is in several new tokens",
    "meaning-changed": "another release of the runtime",
    "parts-do-not-fit": "another file of the bundle",
    "search-differs": "the search in the graph, not its decoder",
    "use-impossible": "a use that the layout does not allow",
}
"""The same of fixtures, where an injected fault of that check may not be proved, or there is none."""
HEAD = """# Proved for every length

`inspect` and `step-test` prove that decoding with a cache and without one agree for every past, chunk and batch,
without a run ([inspect](../docs/commands.md#inspect)). Rounding is not part of it, nor are rows with padding and what
a runtime does. A wrong proof is worse than none: the faulty models of which something is proved were also run.

Written by `python -m evidence.proof.make_page`. *one token a step*: the proof is of steps with one new token alone.
"""

OF_EXPORTS = """The exports of [the zoo](zoo.md), each as far as its tables reach; {faulty} of the stacks that are not
proved wholly have a fault of lengths, positions or masks. In int8, each call rounds activations by a scale of its own.
"""


def table(head: tuple[str, ...], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    yield from (f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)
    yield ""


def result_of(one: Proved) -> str:
    """What was proved, in a cell."""
    if one.proof is None:
        return "no cache contract to prove"
    reasons = "; ".join(one.proof.exceptions).replace("|", "/")
    if not one.proof.holds:
        return f"not proved: {reasons}"
    end = f"up to {one.proof.up_to:,} tokens" if one.proof.up_to is not None else "any length"
    single = f", one token a step{f' ({reasons})' if reasons else ''}" if one.proof.single else ""
    return f"proved, {end}{single}{', but for rounding to integers' if one.proof.rounded else ''}"


def _is_whole(one: Proved) -> bool:
    return one.proof is not None and not one.proof.exceptions


def _share(rows: list[Row], exports: list[tuple[Row, Proved]]) -> tuple[int, int, int, int, str]:
    """Exports of the zoo, those that were made here, their stacks, those that are proved, and the share of these."""
    found = [one for row, one in exports if row in rows]
    proved = sum(map(_is_whole, found))
    share = f"{100 * proved / len(found):.0f} in 100" if found else ""
    return len(rows), len({one.name for one in found}), len(found), proved, share


def _reason_of(one: Proved) -> str:
    """What stops a proof, in kind: the operator, or the kind of the slot or input."""
    reason = one.proof.exceptions[0] if one.proof is not None else "no contract"
    inside = re.search(r"\(([^()]+)\)$", reason)
    return inside[1] if inside and not reason[0].isupper() else reason.split(' "')[0]


def _fixtures(scratch: Path) -> Iterator[tuple[tuple[str, ...], Proved]]:
    for name, fixture in load_all().items():
        for one in prove_folder(fixture.write(scratch / name), name):
            yield tuple(dict.fromkeys(each.name for each in fixture.expect)), one


def _count_drawn(drawn: list[Drawn], faulty: bool) -> tuple[int, int, int]:
    chosen = [one for one in drawn if one.faulty == faulty]
    return len(chosen), sum(one.proved.holds for one in chosen), sum(bool(one.differing) for one in chosen)


def _sections(zoo: list[tuple[Row, Proved]], scratch: Path, numbers: int) -> Iterator[str]:
    exports = [one for _, one in zoo]
    faulty = sum(not _is_whole(one) and any(each.check not in ALLOWED for each in row.faults) for row, one in zoo)
    yield f"## Exports\n\n{OF_EXPORTS.format(faulty=faulty)}"
    kinds = dict.fromkeys((row.exporter, row.variant) for row in ROWS)
    shares = ((*kind, *_share([row for row in ROWS if (row.exporter, row.variant) == kind], zoo)) for kind in kinds)
    head = ("exporter", "variant", "exports of the zoo", "made here", "stacks", "proved wholly", "share")
    yield from table(head, (*shares, ("all", "", *_share(list(ROWS), zoo))))
    stops = Counter(_reason_of(one) for one in exports if not _is_whole(one))
    yield from table(("what stops the others", "stacks"), stops.most_common())
    rows = ((one.name, one.stack, one.nodes, result_of(one), f"{one.seconds * 1000:.0f} ms") for one in exports)
    yield from table(("export", "stack", "nodes", "result", "time of the processor"), rows)
    fixtures = list(_fixtures(scratch / "text"))
    healthy = [one for names, one in fixtures if not names]
    yield f"## Fixtures\n\nOf {len(healthy)} stacks without a finding {sum(one.holds for one in healthy)} are proved.\n"
    stops = Counter(_reason_of(one) for one in healthy if not one.holds)
    yield from table(("what stops the others", "stacks"), stops.most_common())
    faults = list(prove_faults(scratch / "faults"))
    yield from _show_faults([*((names, one) for names, one in fixtures if names), *(((n,), one) for n, one in faults)])
    chosen = product(FAMILIES, range(numbers))
    drawn = [one for name, at in chosen for one in prove_drawn(name, at, FAULTS, scratch / f"{name}-{at}")]
    yield "## Random decoders\n\nThe decoders of [strangers](strangers.md), run in every use that the proof covers.\n"
    counts = ((kind, *_count_drawn(drawn, kind == "faulty")) for kind in ("right", "faulty"))
    yield from table(("decoders", "drawn", "proved", "proved, and refuted by a run"), counts)
    stops = Counter(_reason_of(one.proved) for one in drawn if not one.faulty and not one.proved.holds)
    yield from table(("what stops the others", "right decoders"), stops.most_common(20))


def _show_faults(found: list[tuple[tuple[str, ...], Proved]]) -> Iterator[str]:
    yield f"## Faults\n\nOf {len(found)} stacks with a fault (fixtures, and injected ones) these are proved:\n"
    proved = Counter((names[0], one.proof is not None and one.proof.single) for names, one in found if one.holds)
    rows = (
        (name, count, "one token a step" if single else "all", (ALLOWED | OF_FIXTURES).get(name, ""))
        for (name, single), count in sorted(proved.items())
        if name
    )
    yield from table(("check that finds the fault", "stacks", "proved", "why the proof is right"), rows)


def main() -> int:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zoo", type=Path, default=Path())
    parser.add_argument("--numbers", type=int, default=2)
    given = parser.parse_args()
    made = [(row, folder) for row in ROWS if list((folder := folder_of(row, given.zoo)).glob("*.onnx"))]
    zoo = [(row, one) for row, folder in made for one in prove_folder(folder, f"{row.exporter}-{folder.name}")]
    with TemporaryDirectory(prefix="kvdoctor-proof-") as scratch:
        text = "\n".join((HEAD, *_sections(zoo, Path(scratch), given.numbers)))
    DOCUMENT.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
