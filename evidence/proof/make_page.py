"""Writes evidence/proof.md: what is proved of healthy models, what stops the others, and that no fault is proved.

    python -m evidence.proof.make_page [--made FOLDER] [--numbers N]

`--made` is a folder with more exports, each in a folder of its own; `--numbers` is the number of instances of each
family of random decoders (2).
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from support.text_fixtures import load_all

from evidence.proof.measure import EXPORTS, Drawn, Proved, prove_drawn, prove_faults, prove_folder
from evidence.strangers.families import FAMILIES

DOCUMENT = Path(__file__).parents[1] / "proof.md"
FAULTS = 8
"""Faulty decoders that are drawn for each instance."""
ALLOWED = {
    "": "a harmless change",
    "axis-name-collision": "names of axes, not their lengths",
    "batch-axis-frozen": "one batch, which the proof then says nothing of",
    "cached-branch-first": "the runtime",
    "config-disagrees": "the config",
    "context-limit-fails": "the proof ends before, or the same token is wrong with a cache and without",
    "cross-cache-emptied": "a loop that follows the contract holds the value of the first step",
    "external-data-escapes": "the file",
    "external-data-missing": "the file",
    "graph-unsorted": "the file",
    "invalid-graph": "the file",
    "layers-inconsistent": "names or sizes of layers",
    "non-finite": "no numbers, with a cache and without",
    "padding-changes-logits": "rows with padding, which are no part of the proof",
    "sequence-axis-frozen": "the graph takes one new token, for which it is proved",
    "session-refused": "the runtime",
    "step-fails": "a table ends, and the proof ends there",
}
"""Checks whose faults leave the cache right, and why."""
OF_FIXTURES = {
    "attention-cache-half-wired": "the runtime, which runs no such step",
    "caller-runtime-differs": "the runtime of a caller",
    "duplicate-weights": "the file",
    "empty-tensor-hazard": "the runtime",
    "encoder-rows-differ": "the encoder",
    "ir-too-new": "the runtime",
    "key-value-swapped": "names alone",
    "layers-swapped": "names alone",
    "loop-breaks-contract": "the loop of a caller",
    "mask-not-offset": "the fault is in several new tokens",
    "meaning-changed": "another release of the runtime",
    "names-mislead": "names alone",
    "operator-unsupported": "the runtime",
    "opset-too-new": "the runtime",
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


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """A table in Markdown."""
    cells = list(head)
    yield f"| {' | '.join(cells)} |"
    yield f"|{' --- |' * len(cells)}"
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
    return f"proved, {end}" + (f", one token a step ({reasons})" if one.proof.single else "")


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


def _sections(exports: list[Proved], scratch: Path, numbers: int) -> Iterator[str]:
    proved = [one for one in exports if one.proof is not None and not one.proof.exceptions]
    share = f"{len(proved)} of {len(exports)} stacks ({100 * len(proved) / len(exports):.0f} in 100)"
    folders = len({one.name for one in exports})
    yield f"## Exports\n\nOf {folders} exports {share} are proved wholly, each as far as its tables reach.\n"
    stops = Counter(_reason_of(one) for one in exports if one not in proved)
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
    drawn = [
        one
        for family in FAMILIES
        for number in range(numbers)
        for one in prove_drawn(family, number, FAULTS, scratch / f"{family}-{number}")
    ]
    yield "## Random decoders\n\nThe decoders of [strangers](strangers.md), run in every use that the proof covers.\n"
    rows = ((kind, *_count_drawn(drawn, kind == "faulty")) for kind in ("right", "faulty"))
    yield from table(("decoders", "drawn", "proved", "proved, and refuted by a run"), rows)
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
    parser.add_argument("--made", type=Path)
    parser.add_argument("--numbers", type=int, default=2)
    given = parser.parse_args()
    folders = [*sorted(EXPORTS.iterdir()), *(sorted(given.made.iterdir()) if given.made else [])]
    exports = [one for folder in folders if folder.is_dir() for one in prove_folder(folder, folder.name)]
    with TemporaryDirectory(prefix="kvdoctor-proof-") as scratch:
        text = "\n".join((HEAD, *_sections(exports, Path(scratch), given.numbers)))
    DOCUMENT.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
