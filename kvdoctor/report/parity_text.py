"""How close a run is to its reference run: the table of differences, and what the steps show together, in words."""

from collections.abc import Iterator

from kvdoctor.trace import Difference, Run, Step

HEADER = ["step", "max diff", "of spread", "1 - cos", "KL, nats", "top 1", "top 5"]
UNROUNDED = "unrounded"


def differences_table(run: Run) -> tuple[list[str], list[list[str]]] | None:
    """Step by step: header and rows; None where nothing was held against a reference run."""
    rows = [[str(step.step), *_cells(step.difference)] for step in run.steps if step.difference is not None]
    twin = run.unrounded.relative if run.unrounded is not None else ()
    if len(twin) != len(rows) or not rows:
        return (HEADER, rows) if rows else None
    return [*HEADER, UNROUNDED], [[*row, f"{off:.1e}"] for row, off in zip(rows, twin, strict=True)]


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """What the steps show together: how the error goes, and how the cache ends, as label and text."""
    # Here: a report of a model that was not read again is shown without what reads graphs.
    from kvdoctor.case import growth_words, rounding_words

    if text := growth_words(run):
        yield "error", text
    if run.unrounded is not None:
        yield "rounding", rounding_words(run)
    last = next((step for step in reversed(run.steps) if step.slots), None)
    if last is not None:
        yield "cache", _slots(last)


def _cells(difference: Difference) -> list[str]:
    if not difference.finite:
        return ["not finite", *["-"] * (len(HEADER) - 2)]
    word = {1.0: "same", 0.0: "other"}.get(difference.same_top1, f"{difference.same_top1:.0%}")
    if difference.near_ties > 0:
        # Where candidates lie closer together than the noise, which of them leads tells nothing.
        word = "near tie" if difference.near_ties == 1 else f"{word}, tie"
    return [
        f"{difference.max_abs:.1e}",
        f"{difference.relative:.1e}",
        f"{1 - difference.cosine:.1e}",
        f"{difference.kl:.1e}",
        word,
        f"{difference.same_top5:.0%}",
    ]


def _slots(last: Step) -> str:
    worst = max(last.slots, key=lambda name: last.slots[name])
    return (
        f"after step {last.step}, {len(last.slots)} growing slots held against one call over the same tokens: "
        f"off by {last.slots[worst]:.1e} of their spread at most ({worst})"
    )
