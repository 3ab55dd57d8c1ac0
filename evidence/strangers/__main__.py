"""Decoders of strangers: write them with their truth, run a step-test on each, print or record what was said.

`python -m evidence.strangers write FOLDER`, then `python -m evidence.strangers judge FOLDER --table FILE`.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .cases import faulty, right
from .families import FAMILIES
from .outcome import Expected, step_test
from .page import Row, table


def write(folder: Path, numbers: range, faults: int) -> None:
    """Write these instances of each family, and so many faulty decoders of each, but for those that are there."""
    for number in numbers:
        for family in FAMILIES:
            case = right(family, number)
            if not (folder / "right" / case.name).exists():
                case.write(folder / "right" / case.name)
            for wrong in faulty(family, number, faults):
                wrong.write(folder / "faulty" / wrong.name)


def judge(folder: Path, executable: str, names: list[str], jobs: int) -> Iterator[Row]:
    """Run the step-tests: each row as soon as it is known."""
    found = [path.parent for kind in ("right", "faulty") for path in sorted(folder.glob(f"{kind}/*/expected.json"))]
    chosen = [path for path in found if not names or any(path.match(name) for name in names)]

    def one(path: Path) -> Row:
        loaded = json.loads((path / "expected.json").read_text(encoding="utf-8"))
        return Row(path.name, Expected.loaded(loaded), step_test(executable, path))

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, path) for path in chosen]):
            yield done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0, help="the number of the first instance of each family")
    parser.add_argument("--each", type=int, default=3, help="instances of each family")
    parser.add_argument("--faults", type=int, default=2, help="mistakes in each instance")
    parser.add_argument("--only", nargs="*", default=[], help="patterns of names, as mamba*")
    parser.add_argument("--table", type=Path, help="a file for the table, renewed with each row")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kvdoctor", default=str(Path(sys.executable).with_name("kvdoctor")))
    given = parser.parse_args()
    if given.action == "write":
        write(given.folder, range(given.first, given.first + given.each), given.faults)
        return
    rows: list[Row] = []
    for row in judge(given.folder, given.kvdoctor, given.only, given.jobs):
        rows.append(row)
        if given.table is not None:
            given.table.write_text(table(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
