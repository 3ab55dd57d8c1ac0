"""Writes docs/faq.md and docs/glossary.md, which `kvdoctor explain TEXT` searches: `python docs/make_faq.py`."""

from importlib.resources import files
from pathlib import Path

from kvdoctor.report.escaping import code
from kvdoctor.report.known_messages import KnownText, list_texts

PARTS = {
    "reshape": "Reshape, MatMul, Add: a decode step fails",
    "feeds": "Invalid feeds: the runtime refuses an input",
    "load": "The model does not load",
    "binding": "Your binding crashes",
    "wrong": "No error, wrong tokens",
    "slow": "It works, but it is slow",
}

HEAD = """# Error messages, and the question that decides

The same cause has many messages, and one message has many causes. Find
your message below, answer the question, run the command. `kvdoctor explain 'TEXT'` knows more of
them, and symptoms. MODEL is your export; steps count from 0, the prefill.
"""

TABLE = """
## {title}

| you see | the question that decides | then |
| --- | --- | --- |
"""

ABOUT = """
## About kvdoctor

**It says healthy, and my program is wrong.** Then it is the loop, the binding or the provider. Record a
[trace](trace.md).

**It says unhealthy, and Optimum runs it.** Optimum keeps the cross-attention cache: `kvdoctor step-test MODEL
--consumer held`.

**Does it send my model anywhere?** No. kvdoctor uses no network unless you ask for it (`--target`, `--from`,
`--layout genai`, a `--reference` from the hub), and `--offline` forbids that as well. To show others a failure
without your weights: `kvdoctor repro MODEL -o DIR`.
"""


def page() -> str:
    """The whole page of messages: the entries of each part, a row for each cause."""
    parts = (
        TABLE.format(title=title) + "".join(row for one in list_texts() if one.part == part for row in rows(one))
        for part, title in PARTS.items()
    )
    return HEAD + "".join(parts) + ABOUT


def rows(entry: KnownText) -> list[str]:
    """The rows of an entry: of a symptom the most frequent cause, of a message the first two."""
    causes = entry.causes[: 2 if entry.texts else 1]
    return [
        f"| {'the same' if number else seen(entry)} | {cause.question} | {cause.then} |\n"
        for number, cause in enumerate(causes)
    ]


def seen(entry: KnownText) -> str:
    """What the first column shows: the first message, else the first symptom."""
    return code(entry.texts[0]) if entry.texts else entry.symptoms[0]


def glossary() -> str:
    """The page of terms."""
    return files("kvdoctor.report").joinpath("glossary.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "faq.md").write_text(page(), encoding="utf-8")
    (here / "glossary.md").write_text(glossary(), encoding="utf-8")
