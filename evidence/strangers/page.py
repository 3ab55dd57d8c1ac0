"""The table of what was reported of the decoders, as Markdown: counts, and each one that was misjudged."""

import re
from collections import Counter
from dataclasses import dataclass

from .outcome import Expected, Said

RIGHT = ("clean", "open", "unknown", "false-warning", "false-error", "broken")
FAULTY = ("named", "found", "unknown", "silent", "broken")
HEAD = """# Decoders of strangers

Decoders with random weights, drawn from what ONNX decoders are like: axis orders, packed and fixed caches, counters,
masks, forms of the logits, names, architectures. They are written by `evidence/strangers` without regard to how
kvdoctor reads a graph. A right one gives the same logits in every use (a plain loop, one token first, long, batches,
chunks, left padding) as each row in one call, measured on ONNX Runtime alone; a faulty one has one mistake of its
author, and at least one use that differs from the right decoder, and from its own one call.

Written by `python -m evidence.strangers write FOLDER --first 3 --each 2` and
`python -m evidence.strangers judge FOLDER --table evidence/strangers.md`. The instances 0 to 2 of each family were
looked at while kvdoctor was changed before, and are not in the table. When all of the instances 3 and 4 were judged for
the first time (49 right and 41 faulty ones of 3 had been before), 2 right ones had a false error, 1 a false warning,
and 3 were open, 2 of them by a mistake of the drawing;
of 608 faulty ones 566 were named, 35 found, 5 unknown and 2 silent. Then kvdoctor was changed by what they showed, and
all were judged again by one state of the code: that is the table. It was changed further since; those that were
misjudged at either time were judged with that as well, and of each kind 110 at random: gru_4 and lstm_transducer_3 are
named since, the others are as in the table.

*clean*: no error, no warning. *open*: exit code 3. *unknown*: a finding that the contract is unknown. *named*: a
finding says what is wrong, or in which uses alone. *found*: by another name.
"""

REASONS = {
    r"(positions|tokens|hidden|attended|logits|mask).*(always|several tokens)$": "one call over all tokens is wrong, "
    "and single steps are right: only the right decoder tells which",
    r"positions": "a rotation differs from that of one call; nothing in the graph says that it is one of positions",
    r"(attended|hidden|logits).*(reversed|rolled|first token)": "a token sees later ones, as without a mask",
    r"^(seen|mask)": "a step sees another part of its past; nothing in the graph says that a mask does it",
    r"^write": "the entry of a new token is missing where it belongs",
    r"^past\.(m|u|h|c|n|s|conv|ssm)\b": "a state that is read wrong is returned wrong as well",
    r"^present is": "with the past mixed in, the graph does not show how the buffer is written",
    r"returned twice": "the presents of the other slots are not returned at all",
    r"that of layer 0|exchanged|one place late|in reverse": "both layers return or read equal entries",
}
"""Why a mistake has another name, by what it is."""
OUTCOMES = {
    "open": "the file does not say what an input is",
    "unknown": "the file does not say what an input or a slot is, and with the mistake no reading holds",
    "silent": "not found",
    "found": "the entries or logits that differ first belong to another place",
}


@dataclass(frozen=True)
class Row:
    """A decoder, what was expected, and what was said."""

    name: str
    expected: Expected
    said: Said

    @property
    def word(self) -> str:
        return self.said.judged(self.expected)

    @property
    def cells(self) -> tuple[str, ...]:
        findings = ", ".join(f"{level} {name}" for level, name in self.said.findings) or f"exit code {self.said.code}"
        return self.name, self.word, findings, ", ".join(self.expected.names), self.reason

    @property
    def reason(self) -> str:
        """Why it is misjudged."""
        found = (reason for kind, reason in REASONS.items() if re.search(kind, self.expected.fault))
        general = OUTCOMES.get(self.word, "")
        return next(found, general) if self.word == "found" else general


def table(rows: list[Row]) -> str:
    """The page."""
    lines = [HEAD]
    for title, words in (("right", RIGHT), ("faulty", FAULTY)):
        mine = sorted(
            (row for row in rows if bool(row.expected.names) == (title == "faulty")), key=lambda row: row.cells
        )
        families = len({row.name.partition("--")[0] for row in mine})
        kinds = len({row.expected.fault for row in mine})
        counted = f"{families} decoders" if title == "right" else f"{len(mine)} of {kinds} kinds in {families} decoders"
        lines += [f"## {title.capitalize()}: {counted}", "", f"{_count(mine, words)}.", ""]
        lines += ["| misjudged | outcome | reported | expected | reason |", "| --- | --- | --- | --- | --- |"]
        lines += ["| " + " | ".join(row.cells) + " |" for row in mine if not row.said.well(row.expected)]
        lines.append("")
    return "\n".join(lines)


def _count(rows: list[Row], words: tuple[str, ...]) -> str:
    counts = Counter(row.word for row in rows)
    return ", ".join(f"{counts[word]} {word}" for word in words)


def listed(text: str) -> dict[str, str]:
    """The decoders that a page lists as misjudged, with the outcome of each."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) > 1}
