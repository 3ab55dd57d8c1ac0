"""Writes docs/checks.md from the docstrings of the checks: `python docs/make_checks.py`."""

from pathlib import Path

from kvdoctor.api import list_graph_repairs
from kvdoctor.findings import Check, all_checks

HEAD = """# The checks

Made from the docstrings of `kvdoctor/diagnose/checks/` by `python docs/make_checks.py`. The same text is printed by
`kvdoctor explain CODE`. Codes: KV0xx file and environment, KV1xx the contract as declared, KV2xx what decode steps
showed, KV3xx numbers, KV4xx target runtimes, KV5xx speed and size. Names and codes are never reused: a new check takes
the number after the highest of its block.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(entry, all_checks())])


def entry(check: Check) -> str:
    """The section of one check."""
    text = f"## {check.code} {check.name}\n\n{check.documentation}\n"
    if repairs := list_graph_repairs(check.name):
        links = ", ".join(f"[{name}](repairs.md)" for name in repairs)
        text += f"\nRepairs that `kvdoctor re-export` tries: {links}.\n"
    return text


if __name__ == "__main__":
    Path(__file__).with_name("checks.md").write_text(page(), encoding="utf-8")
