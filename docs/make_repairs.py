"""Writes docs/repairs.md from the repairs themselves: `python docs/make_repairs.py`."""

from pathlib import Path

from kvdoctor.repair.repairs.registry import load

HEAD = """# The repairs

What `kvdoctor re-export PATH -o OUT` can repair in the graph itself. A repair is tried on a copy if a check that calls
for it fired; a note is repaired only if a repair is named, or nothing graver can be repaired. A second diagnosis proves
the copy: the finding is gone, no new one appears, the plain and the held loop have the logits of the reference run, and
the numbers of the original are retained as *keeps* says. Without that proof nothing is written (`--keep-unproved`
writes the copy nevertheless, marked). `--fix NAMES` uses only the named repairs. Which injected faults each removes:
[the table](https://github.com/kvdoctor/kvdoctor/blob/main/evidence/repairs.md).

*keeps*: bits, all logits of the loops that were right before, bit for bit; first-step, the logits of the first step,
bit for bit; reference, the same within the tolerance of the arithmetic; sizes, all outputs at the sizes that the
original accepts, bit for bit; own, none, because the fault affects all of them.

Made from `kvdoctor/repair/repairs/` by `python docs/make_repairs.py`; each says what it
requires and ensures.

| repair | what it does | repairs | keeps |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    rows = (f"| `{one.name}` | {one.summary} | {', '.join(one.checks)} | {one.keeps} |\n" for one in load())
    return HEAD + "".join(rows)


if __name__ == "__main__":
    Path(__file__).with_name("repairs.md").write_text(page(), encoding="utf-8")
