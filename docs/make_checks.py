"""Writes docs/checks.md from the docstrings of the checks: `python docs/make_checks.py`."""

from pathlib import Path

from kvdoctor.findings import all_checks

HEAD = """# The checks

Made from the docstrings of `kvdoctor/checks/` by `python docs/make_checks.py`. The same text is printed by
`kvdoctor explain CODE`. Codes: KV0xx file and environment, KV1xx the contract as declared, KV2xx what decode steps
showed, KV3xx numbers, KV4xx target runtimes. Names and codes are never reused.
"""


def page() -> str:
    """The whole page."""
    entries = [f"## {check.code} {check.name}\n\n{check.documentation}\n" for check in all_checks()]
    return "\n".join([HEAD, *entries])


if __name__ == "__main__":
    Path(__file__).with_name("checks.md").write_text(page(), encoding="utf-8")
