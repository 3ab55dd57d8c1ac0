"""Writes evidence/config.md from a run.

    python -m evidence.config.make_page [--exports DIR]

It makes the zoo, unless DIR has it from an earlier run.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from evidence.config.changes import FAMILIES, Change, change_each, findings, row_of
from evidence.zoo.making import Maker
from evidence.zoo.tables import ROWS

DOCUMENT = Path(__file__).parents[1] / "config.md"
HEAD = """# Values of config.json

A decoder whose window, rotary base or soft cap got lost in the export agrees with itself, with and without a cache:
no run shows it. `kvdoctor inspect` compares config.json with the constants of the graph. Each value was changed alone
in the config.json of a healthy export. *named*: the finding has the key, the changed value, and that of the graph.
Written by `python -m evidence.config.make_page`; `evidence/config/test_values.py` makes a part of the run again.

The keys are of those that are compared. `use_parallel_residual`, `use_qk_norm`, `do_layer_norm_before`, `clip_qkv`, the
length that a rotary embedding was trained for and the like show in no constant, and are not compared.

{named} of {count} changed values in {families} families are named. Of {exports} exports of [the zoo](zoo.md) with
their own config.json, {alarms} {verb} a finding.

| family | named | changed values | not named |
| --- | --- | --- | --- |
"""
OWN = """
## Exports with their own config.json

| export | declared | observed |
| --- | --- | --- |
"""


def tabulate(family: str, changes: list[Change]) -> str:
    """One row of the table."""
    named = [f"`{one.key}`" for one in changes if one.finding is not None]
    missed = [f"`{one.key}`" for one in changes if one.finding is None]
    return f"| {family} | {len(named)} of {len(changes)} | {', '.join(named)} | {', '.join(missed)} |\n"


def make_page(maker: Maker) -> str:
    """The page, from a run."""
    changed: dict[str, list[Change]] = {}
    for key, values in FAMILIES.items():
        made = maker.make(row_of(*key))
        if made.obstacle or made.failure:
            raise SystemExit(f"{key}: {made.obstacle or made.failure}")
        changed[f"{key[1]} ({key[0]})"] = list(change_each(made.folder, values))
    exports = [(row, maker.make(row)) for row in ROWS]
    with_config = [(row, made) for row, made in exports if not made.failure and (made.folder / "config.json").exists()]
    own = [(row, one) for row, made in with_config for one in findings(made.folder)]
    every = [one for changes in changed.values() for one in changes]
    head = HEAD.format(
        named=sum(one.finding is not None for one in every),
        count=len(every),
        families=len(changed),
        exports=len(with_config),
        alarms=len({str(row) for row, _ in own}),
        verb="has" if len({str(row) for row, _ in own}) == 1 else "have",
    )
    rows = "".join(tabulate(family, changes) for family, changes in changed.items())
    wrong = "".join(f"| {row} | {one.declared} | {one.observed} |\n" for row, one in own)
    return head + rows + (OWN + wrong if wrong else "")


def main() -> int:
    """Reads the command line and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exports", type=Path, metavar="DIR", help="folder that keeps the exports")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        DOCUMENT.write_text(make_page(Maker(args.exports or Path(scratch))), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
