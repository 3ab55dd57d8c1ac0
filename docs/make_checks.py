"""Writes docs/checks.md from the docstrings of the checks: `python docs/make_checks.py`."""

from pathlib import Path

from kvdoctor.api import list_graph_repairs
from kvdoctor.findings import Check, all_checks

HEAD = """# The checks

Made from the docstrings of `kvdoctor/diagnose/checks/` by `python docs/make_checks.py`. The same text is printed by
`kvdoctor explain CODE`, with the paragraphs that checks share. Codes: KV0xx file and environment, KV1xx the contract as
declared, KV2xx what decode steps showed, KV3xx numbers, KV4xx target runtimes, KV5xx speed and size. Names and codes
are never reused: a new check takes the number after the highest of its block.
"""

LABELS = ("How it is decided", "Reproduce", "Repair", "Source")
FEW = 14
"""Words of a paragraph that stands under each of its checks."""


def page() -> str:
    """The whole page."""
    under: dict[str, str] = {}
    return "\n".join([HEAD, *(entry(check, under) for check in all_checks())])


def entry(check: Check, under: dict[str, str]) -> str:
    """The section of one check; `under` has the check under which each paragraph stands, which several may share."""
    paragraphs, shared = [], dict[str, list[str]]()
    own = f"[{check.code}](#{check.code.lower()}-{check.name})"
    for paragraph in check.documentation.split("\n\n"):
        label, _, rest = paragraph.partition(": ")
        other = under.setdefault(paragraph, own)
        if other != own and label in LABELS and len(rest.split()) > FEW:
            shared.setdefault(other, []).append(label)
        else:
            paragraphs.append(paragraph)
    paragraphs += [f"{', '.join(labels)}: as for {other}." for other, labels in shared.items()]
    text = "\n\n".join((f"## {check.code} {check.name}", *paragraphs)) + "\n"
    if repairs := list_graph_repairs(check.name):
        links = ", ".join(f"[{name}](repairs.md)" for name in repairs)
        text += f"\nRepairs that `kvdoctor re-export` tries: {links}.\n"
    return text


if __name__ == "__main__":
    Path(__file__).with_name("checks.md").write_text(page(), encoding="utf-8")
