"""Measures kvdoctor against stated alternatives: `python benchmarks/run.py [NAME ...]`.

Prints one table; the exit code is 1 if a figure is over its limit. README.md says what is held against what.
"""

import argparse
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import peers
import psutil
from measure import Command, interleaved, kvdoctor, middle, peak_alone_mib, peak_mib, python

HERE = Path(__file__).parent
FIXTURE = HERE.parent / "fixtures" / "exports" / "marian-4.57.6"
KEPT_OUT = ("onnx", "numpy", "rich", "onnxruntime")
WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}  # as kvdoctor/child.py sets it
SHORT_REPEATS, LONG_REPEATS, SOME_REPEATS, MEMORY_REPEATS = 15, 7, 5, 3
INFER = "import onnx, sys; [onnx.shape_inference.infer_shapes(onnx.load(path)) for path in sys.argv[1:]]"
LOAD_AND_SAVE = """
import onnx, sys
model = onnx.load(sys.argv[1] + "/decoder_model_merged.onnx")
onnx.save(model, sys.argv[2], save_as_external_data=True, location="saved.onnx_data")
"""
KINDS = {
    "plain": "one graph",
    "merged": "an If with two branches",
    "functions": "local functions",
    "numbered": "a pair without names",
}
# Layers for 25,000, 50,000 and 100,000 nodes: 500 each, and twice as many where another branch or graph has them too.
LAYERS = {"plain": (50, 100, 200), "merged": (25, 50, 100), "functions": (50, 100, 200), "numbered": (25, 50, 100)}
COLUMNS = ("what", "figure", "alternative", "its figure", "ratio", "limit", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `over` is None where there is no limit."""

    what: str
    figure: str
    alternative: str = ""
    its_figure: str = ""
    ratio: str = ""
    limit: str = ""
    over: bool | None = None

    def cells(self) -> tuple[str, ...]:
        verdict = {None: "", True: "OVER", False: "ok"}[self.over]
        return (self.what, self.figure, self.alternative, self.its_figure, self.ratio, self.limit, verdict)


def start(_: Path) -> Iterator[Row]:
    """What a user waits for who only asks for help."""
    for option in ("--help", "--version"):
        pair = interleaved(kvdoctor(option), python("-c", "pass"), SHORT_REPEATS)
        more = f"+{pair.more:.3f} s"
        row = (f"kvdoctor {option}", f"{pair.ours:.3f} s", "python -c pass", f"{pair.theirs:.3f} s")
        yield Row(*row, more, "+0.15 s", pair.more > 0.15)
        imported = _imports(kvdoctor(option)) & set(KEPT_OUT)
        what = f"kvdoctor {option}: imports of {', '.join(KEPT_OUT)}"
        yield Row(what, ", ".join(sorted(imported)) or "none", limit="none", over=bool(imported))


def _imports(command: Command) -> set[str]:
    """Top-level packages that a command imports, by Python's own account."""
    errors = Command(command.line, command.code, {"PYTHONPROFILEIMPORTTIME": "1"}).run()
    modules = (line.rpartition("|")[2].strip() for line in errors.splitlines() if line.startswith("import time:"))
    return {module.partition(".")[0] for module in modules}


def inspect(scratch: Path) -> Iterator[Row]:
    """A graph is read without its weights, whatever the size of the file."""
    folder = _model("1.8gb-inside", scratch)
    ours = kvdoctor("inspect", "--format", "json", str(folder))
    load = python("-c", "import onnx, sys; onnx.load(sys.argv[1])", str(folder / "model.onnx"))
    what = "inspect, 1.8 GB with the weights inside"
    pair = interleaved(ours, python("-c", "import onnx"), SHORT_REPEATS)
    row = (f"{what}: time", f"{pair.ours:.3f} s", 'python -c "import onnx"', f"{pair.theirs:.3f} s")
    yield Row(*row, f"{pair.ratio:.2f}", "1.30", pair.ratio > 1.3)
    loading = middle(load, MEMORY_REPEATS)
    row = (f"{what}: time", f"{pair.ours:.3f} s", "onnx.load of the file", f"{loading:.3f} s")
    yield Row(*row, f"{pair.ours / loading:.2f}")
    mine, other = (middle(command, MEMORY_REPEATS, peak_mib) for command in (ours, load))
    row = (f"{what}: memory", f"{mine:.0f} MiB", "onnx.load of the file", f"{other:.0f} MiB")
    yield Row(*row, f"{mine / other:.2f}", "100 MB", mine > 100e6 / (1 << 20))
    shutil.rmtree(folder)


def contract(scratch: Path) -> Iterator[Row]:
    """Every node of a graph is followed, in a time that grows as the nodes do."""
    for kind, shown in KINDS.items():
        folders = [scratch / f"{kind}-{layers}" for layers in LAYERS[kind]]
        for layers, folder in zip(LAYERS[kind], folders, strict=True):
            folder.mkdir()
            python(str(HERE / "graphs.py"), kind, str(layers), str(folder)).run()
        few, some, many = (kvdoctor("contract", "--format", "json", str(folder)) for folder in folders)
        what, files = f"contract, {shown}, {LAYERS[kind][1]} layers", map(str, sorted(folders[1].iterdir()))
        pair = interleaved(some, python("-c", INFER, *files), SOME_REPEATS)
        row = (f"{what}: 50,000 nodes", f"{pair.ours:.2f} s", "onnx.load, infer_shapes", f"{pair.theirs:.2f} s")
        yield Row(*row, f"{pair.ratio:.2f}", "3 s", pair.ours > 3)
        for nodes, command, limit in (("50,000", some, 2.2), ("100,000", many, 4.4)):
            pair = interleaved(command, few, SOME_REPEATS)
            row = (f"contract, {shown}: {nodes} nodes", f"{pair.ours:.2f} s", "25,000 nodes", f"{pair.theirs:.2f} s")
            yield Row(*row, f"{pair.ratio:.2f}", f"{limit:.1f}", pair.ratio > limit)


def step_test(scratch: Path) -> Iterator[Row]:
    """The runs cost what they cost; what kvdoctor adds to them is bounded."""
    for name, where in (("100m-beside", "external data"), ("100m-inside", "weights inside")):
        folder = _model(name, scratch)
        ours, bare = kvdoctor("step-test", "--format", "json", str(folder)), _bare(folder, scratch)
        what = f"step-test, 100 million parameters, {where}"
        pair = interleaved(ours, bare, LONG_REPEATS)
        row = (f"{what}: time", f"{pair.ours:.2f} s", "bare script, same runs", f"{pair.theirs:.2f} s")
        yield Row(*row, f"{pair.ratio:.2f}", "1.30", pair.ratio > 1.3)
        pair = interleaved(ours, _bare(folder, scratch, "--three-loops"), LONG_REPEATS)
        row = (f"{what}: time", f"{pair.ours:.2f} s", "bare script, three loops", f"{pair.theirs:.2f} s")
        yield Row(*row, f"{pair.ratio:.2f}", "3.00", pair.ratio > 3)
        pair = interleaved(ours, bare, MEMORY_REPEATS, peak_mib)
        row = (f"{what}: memory", f"{pair.ours:.0f} MiB", "bare script, same runs", f"{pair.theirs:.0f} MiB")
        yield Row(*row, f"{pair.ratio:.2f}", "1.30", pair.ratio > 1.3)
        shutil.rmtree(folder)


def place(scratch: Path) -> Iterator[Row]:
    """Where a large decoder goes wrong: the whole step-test, its search included, against that of a sound one."""
    sound = _model("100m-inside", scratch)
    well = kvdoctor("step-test", "--format", "json", str(sound))
    base = middle(well, MEMORY_REPEATS, peak_mib)
    for name, fault in (("100m-fails", "a step that fails"), ("100m-differs", "logits that differ")):
        folder = _model(name, scratch)
        ill = kvdoctor("step-test", "--format", "json", str(folder), code=1)
        what = f"place of {fault}, 100 million parameters"
        pair = interleaved(ill, well, SOME_REPEATS)
        row = (f"{what}: time", f"{pair.ours:.2f} s", "a sound one, no search", f"{pair.theirs:.2f} s")
        yield Row(*row, f"+{pair.more:.2f} s", "+60 s", pair.more > 60)
        mine = middle(ill, MEMORY_REPEATS, peak_mib)
        row = (f"{what}: memory", f"{mine:.0f} MiB", "a sound one, no search", f"{base:.0f} MiB")
        yield Row(*row, f"{mine / base:.2f}", "2.00", mine > 2 * base)
        if name == "100m-differs":
            by_hand = python(str(HERE / "mark_all.py"), str(folder / "model.onnx"))
            cost, size = middle(by_hand, MEMORY_REPEATS), middle(by_hand, MEMORY_REPEATS, peak_mib)
            row = (f"{what}: time", f"{pair.ours:.2f} s", "onnx.load, every value an output", f"{cost:.2f} s")
            yield Row(*row, f"{pair.ours / cost:.2f}")
            row = (f"{what}: memory", f"{mine:.0f} MiB", "onnx.load, every value an output", f"{size:.0f} MiB")
            yield Row(*row, f"{mine / size:.2f}")
        shutil.rmtree(folder)


def polygraphy(scratch: Path) -> Iterator[Row]:
    """The nearest peer on a decoder whose steps fail from a past of 4 on, by what it can do."""
    if reason := peers.missing():
        yield Row("step-test beside Polygraphy", "not measured", reason.splitlines()[0][:60])
        return
    folder = _model("100m-fails", scratch)
    model = folder / "model.onnx"
    ours = kvdoctor("step-test", "--format", "json", str(folder), code=1)
    for theirs, what in (
        (peers.run(model), "run: finds nothing"),
        (peers.run_step(model), "run, shapes by hand: the error"),
        (peers.reduce(model, scratch), "debug reduce: ends in an error"),
    ):
        pair = interleaved(ours, theirs, MEMORY_REPEATS)
        row = (
            "step-test: the failing node",
            f"{pair.ours:.2f} s",
            f"Polygraphy {what}",
            f"{pair.theirs:.2f} s",
        )
        yield Row(*row, f"{pair.ratio:.2f}")
    shutil.rmtree(folder)


def fixture(scratch: Path) -> Iterator[Row]:
    """What a team waits for in CI on a model that costs nothing to run."""
    ours = kvdoctor("step-test", "--format", "json", str(FIXTURE), code=1)
    pair = interleaved(ours, _bare(FIXTURE, scratch), SHORT_REPEATS)
    row = (f"step-test, fixture {FIXTURE.name}", f"{pair.ours:.2f} s", "bare script, same runs", f"{pair.theirs:.2f} s")
    yield Row(*row, f"+{pair.more:.2f} s", "+0.60 s", pair.more > 0.6)


def re_export(scratch: Path) -> Iterator[Row]:
    """Diagnosed, repaired, diagnosed again and proved."""
    out = scratch / "repaired"
    cost = middle(kvdoctor("re-export", "--force", str(FIXTURE), "-o", str(out)), LONG_REPEATS)
    yield Row(f"re-export, fixture {FIXTURE.name}", f"{cost:.2f} s", limit="aim: 3 s")
    for where in ("beside", "inside"):
        yield from _large_re_export(where, scratch, out)


def _large_re_export(where: str, scratch: Path, out: Path) -> Iterator[Row]:
    """The memory of kvdoctor itself on a merged decoder of 1.8 GB; the runtime's own stands for itself."""
    folder = scratch / f"ballast-{where}"
    folder.mkdir()
    python(str(HERE / "ballast.py"), where, str(folder)).run()
    ours = kvdoctor("re-export", "--force", str(folder), "-o", str(out))
    mine, other = peak_alone_mib(ours), peak_mib(python("-c", LOAD_AND_SAVE, str(folder), str(scratch / "saved.onnx")))
    what = f"re-export, 1.8 GB, weights {where}: memory without the runtime's"
    row = (what, f"{mine:.0f} MiB", "onnx.load + onnx.save", f"{other:.0f} MiB")
    yield Row(*row, f"{mine / other:.2f}", "300 MB", mine > 300e6 / (1 << 20))
    shutil.rmtree(folder)
    for left in scratch.glob("saved.onnx*"):
        left.unlink()


def unmerge(scratch: Path) -> Iterator[Row]:
    """A merged decoder is taken apart without its weights being loaded."""
    for name, where in (("1.8gb-beside", "external data"), ("1.8gb-inside", "weights inside")):
        folder, script = _model(name, scratch), str(HERE / "unmerge.py")
        python(script, "make", str(folder)).run()
        ours = python(script, "kvdoctor", str(folder), str(scratch / "pair"))
        other = python(script, "onnx", str(folder), str(scratch / "saved"))
        what = f"merged decoder to pair, 1.8 GB, {where}"
        pair = interleaved(ours, other, MEMORY_REPEATS)
        row = (f"{what}: time", f"{pair.ours:.2f} s", "onnx.load, onnx.save", f"{pair.theirs:.2f} s")
        yield Row(*row, f"{pair.ratio:.2f}")
        mine, theirs = (middle(command, MEMORY_REPEATS, peak_mib) for command in (ours, other))
        row = (f"{what}: memory", f"{mine:.0f} MiB", "onnx.load, onnx.save", f"{theirs:.0f} MiB")
        yield Row(*row, f"{mine / theirs:.2f}", "300 MB", mine > 300e6 / (1 << 20))
        for made in (folder, scratch / "pair", scratch / "saved"):
            shutil.rmtree(made)


def _model(name: str, scratch: Path) -> Path:
    folder = scratch / name
    folder.mkdir()
    python(str(HERE / "models.py"), name, str(folder)).run()
    return folder


def _bare(folder: Path, scratch: Path, *which: str) -> Command:
    """The bare script with the plan of a step-test, and with the environment that kvdoctor gives its worker."""
    plan = scratch / "-".join((folder.name, *which, "plan.json"))
    record, bare = (str(HERE / name) for name in ("record.py", "bare.py"))
    Command((sys.executable, record, str(folder), str(plan), *which), environment=WORKER_ENVIRONMENT).run()
    return Command((sys.executable, bare, str(plan), str(folder)), environment=WORKER_ENVIRONMENT)


BENCHMARKS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "start": start,
    "inspect": inspect,
    "contract": contract,
    "step-test": step_test,
    "place": place,
    "polygraphy": polygraphy,
    "fixture": fixture,
    "re-export": re_export,
    "unmerge": unmerge,
}


def table(rows: list[Row]) -> str:
    """The rows as Markdown, in columns."""
    cells = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(COLUMNS))]
    cells.insert(1, tuple("-" * width for width in widths))
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(f"| {line} |" for line in lines)


def machine(busy: float) -> str:
    """What the figures were measured on; a busy machine stretches differences in seconds as much as the runs."""
    cores, memory = psutil.cpu_count(), psutil.virtual_memory().total / (1 << 30)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("onnx", "onnxruntime", "numpy"))
    system = f"{sys.platform} {platform.machine()}, Python {platform.python_version()}"
    return (
        f"{cores} cores, {memory:.0f} GiB, {system}, {versions}; "
        f"load average {busy:.1f} before, {psutil.getloadavg()[0]:.1f} after"
    )


def main() -> int:
    """Measure what is asked for; give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all of them without")
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}, only {', '.join(BENCHMARKS)}")
    rows, busy = list[Row](), psutil.getloadavg()[0]
    for name in names:
        with tempfile.TemporaryDirectory(prefix="kvdoctor-benchmarks-") as scratch:
            sys.stderr.write(f"measuring {name} ...\n")
            rows += BENCHMARKS[name](Path(scratch))
    sys.stdout.write(f"{table(rows)}\n\n{machine(busy)}\n")
    return int(any(row.over for row in rows))


if __name__ == "__main__":
    sys.exit(main())
