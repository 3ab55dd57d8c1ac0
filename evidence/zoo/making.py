"""Makes the exports of the zoo, each once, however many processes ask for it.

The scripts run in isolated environments. They are asked for several exports at a time, because starting one takes
longer than many an export; the batches are small enough for two processes to share the work.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.isolated import EXPORTS, Environment, call

from evidence.zoo import genai_exports, optimum_exports, transformers_exports, variants
from evidence.zoo.row import Row
from evidence.zoo.tables import ROWS

HERE = Path(__file__).parent
BATCH = 10
"""Exports that one call of a script makes."""
MOST_SECONDS = 1800
"""How long a process waits for another one to make a batch."""

OPTIMUM = Environment(optimum_exports.PYTHON, optimum_exports.REQUIREMENTS, ("torch", "transformers", "optimum"))
TRANSFORMERS = Environment(
    transformers_exports.PYTHON, transformers_exports.REQUIREMENTS, ("torch", "transformers", "onnxscript")
)
GENAI = Environment(genai_exports.PYTHON, genai_exports.REQUIREMENTS, ("torch", "transformers", "onnxruntime_genai"))
TOOLS = Environment(variants.PYTHON, variants.REQUIREMENTS, ("onnxruntime", "onnxslim"))
ENVIRONMENTS = {"optimum": OPTIMUM, "transformers": TRANSFORMERS, "genai": GENAI}


@dataclass(frozen=True)
class Made:
    """An export, or why there is none.

    Attributes:
        folder: Where it lies.
        obstacle: What is missing here to make it; None where nothing is.
        failure: What the script said when it did not make it; None where it did.
    """

    folder: Path
    obstacle: str | None = None
    failure: str | None = None


class Maker:
    """Makes exports below a folder, which several processes may share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, row: Row) -> Made:
        """Makes the export of a row, and the others of its batch, unless that is done already."""
        if row.variant == "exported":
            return self._exported(row)
        if row.exporter == "committed":
            return self._rewritten(row, EXPORTS, None)
        source = self._exported(_source(row))
        return source if source.obstacle or source.failure else self._rewritten(row, source.folder.parent, TOOLS)

    def _exported(self, row: Row) -> Made:
        if row.exporter == "committed":
            return Made(folder_of(row, self.root))
        folder = folder_of(row, self.root)
        number, batch = _batch(row)
        names = [each.architecture for each in batch]
        command: tuple[str | Path, ...] = (HERE / f"{row.exporter}_exports.py", folder.parent, *names)
        return self._once(f"{row.exporter}-{number}", folder, ENVIRONMENTS[row.exporter], command)

    def _rewritten(self, row: Row, exports: Path, environment: Environment | None) -> Made:
        """Rewrites the export of a row in every way that the tables ask for."""
        folder = folder_of(row, self.root)
        kin = [each for each in ROWS if (each.exporter, each.architecture) == (row.exporter, row.architecture)]
        wanted = [f"{each.architecture}:{each.variant}" for each in kin if each.variant != "exported"]
        command: tuple[str | Path, ...] = (HERE / "variants.py", exports, folder.parent, *wanted)
        return self._once(f"{row.exporter}-variants-{row.architecture}", folder, environment, command)

    def _once(self, batch: str, folder: Path, environment: Environment | None, command: Sequence[str | Path]) -> Made:
        def run() -> dict[str, str | None]:
            obstacle = environment.obstacle() if environment else None
            if obstacle is not None:
                return {"obstacle": obstacle, "said": None}
            done = call([*(environment.command() if environment else [sys.executable]), *command], MOST_SECONDS)
            return {"obstacle": None, "said": (done.stdout + done.stderr)[-2000:]}

        outcome = first_one_does(self.root / "batches" / batch, run)
        failed = folder / "failed.txt"
        if outcome["obstacle"] is not None:
            return Made(folder, obstacle=outcome["obstacle"])
        if failed.exists():
            return Made(folder, failure=failed.read_text(encoding="utf-8"))
        return Made(folder, failure=None if list(folder.glob("*.onnx")) else f"nothing was made: {outcome['said']}")


def folder_of(row: Row, root: Path) -> Path:
    """The folder of an export; `root` is that of all that are made."""
    if row.variant != "exported":
        return root / f"{row.exporter}-variants" / f"{row.architecture}-{row.variant}"
    return (EXPORTS if row.exporter == "committed" else root / row.exporter) / row.architecture


def first_one_does(folder: Path, work: Callable[[], dict[str, str | None]]) -> dict[str, str | None]:
    """Returns what `work` returned in the first process that came here with this folder; the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = folder / "outcome.json"
    try:
        (folder / "claimed").touch(exist_ok=False)
    except FileExistsError:
        _wait_for(outcome)
    else:
        result: dict[str, str | None] = {"obstacle": None, "said": "the process that began this did not finish it"}
        try:
            result = work()
        finally:
            unfinished = folder / "outcome.tmp"
            unfinished.write_text(json.dumps(result), encoding="utf-8")
            unfinished.replace(outcome)
    read: dict[str, str | None] = json.loads(outcome.read_text(encoding="utf-8"))
    return read


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process did not finish {file.parent.name} in {MOST_SECONDS} seconds")
        time.sleep(0.1)


def _source(row: Row) -> Row:
    """Returns the row of the export that a row is made of: its own, if nothing was rewritten."""
    key = (row.exporter, row.architecture, "exported")
    return next(each for each in ROWS if (each.exporter, each.architecture, each.variant) == key)


def _batch(row: Row) -> tuple[int, tuple[Row, ...]]:
    """Returns the number and the rows of the batch in which an export is made."""
    rows = tuple(each for each in ROWS if each.exporter == row.exporter and each.variant == "exported")
    number = rows.index(row) // BATCH
    return number, rows[number * BATCH : (number + 1) * BATCH]
