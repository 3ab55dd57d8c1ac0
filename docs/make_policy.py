"""Writes the table of keys in policy.md from kvdoctor/options.py: `python docs/make_policy.py`."""

import json
import re
from pathlib import Path

from kvdoctor.options import policy_options

PAGE = Path(__file__).parent / "policy.md"
BEGIN, END = "<!-- keys -->", "<!-- end of keys -->"


def table() -> str:
    """Return a row for each key."""
    rows = ["| key | takes | default | meaning | example |", "| --- | --- | --- | --- | --- |"]
    for option in policy_options():
        default = "none" if option.default is None else json.dumps(option.kind.to_plain(option.default))
        once = " Set once, not in an override." if option.once else ""
        rows.append(f"| `{option.key}` | {option.kind.takes} | `{default}` | {option.help}{once} | `{option.policy}` |")
    return "\n".join(rows)


def page() -> str:
    """Return the page with its table."""
    return re.sub(
        f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
