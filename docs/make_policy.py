"""Writes the table of keys in policy.md from kvdoctor/policy/keys.py: `python docs/make_policy.py`."""

import json
import re
from pathlib import Path

from kvdoctor.policy import KEYS

PAGE = Path(__file__).parent / "policy.md"
BEGIN, END = "<!-- keys -->", "<!-- end of keys -->"


def table() -> str:
    """A row for each key."""
    rows = ["| key | takes | default | means | as in |", "| --- | --- | --- | --- | --- |"]
    for key in KEYS:
        default = "none" if key.default is None else json.dumps(key.default)
        once = "" if key.by_model else "; said once, not in an override"
        rows.append(f"| `{key.name}` | {key.takes} | `{default}` | {key.means}{once} | `{key.example}` |")
    return "\n".join(rows)


def page() -> str:
    """The page with the table as it is to be."""
    return re.sub(
        f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
