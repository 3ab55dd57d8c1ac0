"""The benchmarks: what kvdoctor costs, each figure beside that of a stated alternative.

Each takes a scratch folder and a scale, and yields rows as they are measured. README.md describes them.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import gate
import loops
import peers
from measure import (
    MIB,
    Command,
    Pair,
    interleaved,
    kvdoctor,
    median_cost,
    peak_alone_mib,
    peak_mib,
    processor_seconds,
    python,
)
from models import MODELS

HERE = Path(__file__).parent
FIXTURE = HERE.parent / "fixtures" / "exports" / "marian-4.57.6"
LOOP_FIXTURE = FIXTURE.with_name("llama-gqa")
NOT_IMPORTED = ("onnx", "numpy", "rich", "onnxruntime")
WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
"""As kvdoctor/runtime sets it for its worker."""

INFER = "import onnx, sys; [onnx.shape_inference.infer_shapes(onnx.load(path)) for path in sys.argv[1:]]"
CHECK = """
import onnx, sys
onnx.checker.check_model(onnx.load(sys.argv[1], load_external_data=False))
"""
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
MB_IN_MIB = 1e6 / (1 << 20)
INSPECT_LIMITS = {"sound": 4.0, "faulty": 2.0}
"""Times `import onnx`. What runs of a sound model would show is predicted; of a faulty contract nothing is."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the models are, and how often each command is measured.

    `loop_blocks` are the turns that a loop and a bare program take in a round; `loop_steps` are the steps between which
    their memory must not grow.

    `layers` are those of the graphs of `contract` by kind: 500 nodes each, or 1,000 where a second branch or graph
    has them too, so that they have 25,000, 50,000 and 100,000 nodes.

    `extremes` are models that are large in one way, `growing` ways in which a model grows.
    """

    short_repeats: int = 15
    long_repeats: int = 7
    few_repeats: int = 5
    memory_repeats: int = 3
    gated_models: int = 100
    loop_blocks: int = 8
    loop_steps: tuple[int, int] = (200, 2_000)
    layers: tuple[int, int, int] = (50, 100, 200)
    extremes: tuple[str, ...] = ("embeds-262k", "words-262k", "slots-400", "1.2b-beside")
    growing: tuple[str, ...] = ("words", "layers", "steps")
    deep: tuple[str, str] = ("layers-4", "layers-16")
    stepped: tuple[str, ...] = ("layers-2", "layers-8", "100m-beside")
    large: str = "1.8gb"
    medium: str = "100m"
    thin: str = "thin"
    large_bytes: int = 1_800_000_000
    warm: bool = True

    @property
    def size(self) -> str:
        """The size of the large models, for the table."""
        return f"{self.large_bytes / 1e9:.1f} GB" if self.large_bytes > 1e8 else f"{self.large_bytes / 1e6:.0f} MB"


FULL = Scale()
SMALLEST = Scale(
    *(
        1,
        1,
        1,
        1,
        2,
        2,
        (2, 4),
        (1, 2, 4),
        ("tiny-embeds",),
        ("tiny-embeds",),
        ("tiny-inside",) * 2,
        ("tiny-inside",),
        *("tiny",) * 3,
    ),
    large_bytes=1_000_000,
    warm=False,
)
"""For a test that every benchmark runs. Its figures mean nothing."""


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


def _time_row(what: str, pair: Pair, alternative: str, limit: float | None = None) -> Row:
    """Times in seconds, and their ratio with its limit."""
    figures = (f"{pair.ours:.3f} s", alternative, f"{pair.theirs:.3f} s", f"{pair.ratio:.2f}")
    return Row(f"{what}: time", *figures, f"{limit:.2f}" if limit else "", pair.ratio > limit if limit else None)


def _difference_row(what: str, pair: Pair, alternative: str, limit: float) -> Row:
    """Times in seconds, and their difference with its limit."""
    figures = (f"{pair.ours:.3f} s", alternative, f"{pair.theirs:.3f} s", f"+{pair.more:.3f} s")
    return Row(f"{what}: time", *figures, f"+{limit:.2f} s", pair.more > limit)


def _memory_row(what: str, ours: float, theirs: float, alternative: str, limit_mb: int | None = None) -> Row:
    """Peaks in MiB; the limit, in MB, is that of our own peak."""
    over = ours > limit_mb * MB_IN_MIB if limit_mb else None
    limit = f"{limit_mb} MB" if limit_mb else ""
    figures = (f"{ours:.0f} MiB", alternative, f"{theirs:.0f} MiB", f"{ours / theirs:.2f}")
    return Row(f"{what}: memory", *figures, limit, over)


def start(_: Path, scale: Scale) -> Iterator[Row]:
    """The start of the command line: help and version."""
    for option in ("--help", "--version"):
        pair = interleaved(kvdoctor(option), python("-c", "pass"), scale.short_repeats, warm=scale.warm)
        yield _difference_row(f"kvdoctor {option}", pair, "python -c pass", 0.15)
        imported = _imports(kvdoctor(option)) & set(NOT_IMPORTED)
        what = f"kvdoctor {option}: imports of {', '.join(NOT_IMPORTED)}"
        yield Row(what, ", ".join(sorted(imported)) or "none", limit="none", over=bool(imported))


def _imports(command: Command) -> set[str]:
    """Top-level packages that a command imports, as reported by Python."""
    errors = Command(command.line, command.code, {"PYTHONPROFILEIMPORTTIME": "1"}).run()
    modules = (line.rpartition("|")[2].strip() for line in errors.splitlines() if line.startswith("import time:"))
    return {module.partition(".")[0] for module in modules}


def inspect(scratch: Path, scale: Scale) -> Iterator[Row]:
    """A graph is read without its weights, whatever the size of the file: a sound model and a faulty one.

    The sound one is also compared with the same graph without the weights: a file of 1.8 GB may cost no more.
    """
    narrow = kvdoctor("inspect", "--format", "json", str(_make_model(f"{scale.large}-narrow", scratch)))
    for name, adjective, code in ((f"{scale.large}-inside", "sound", 0), (f"{scale.large}-crossed", "faulty", 1)):
        folder = _make_model(name, scratch)
        ours = kvdoctor("inspect", "--format", "json", str(folder), code=code)
        what = f"inspect, {adjective} model, {scale.size} with the weights inside"
        pair = interleaved(ours, python("-c", "import onnx"), scale.short_repeats, warm=scale.warm)
        yield _time_row(what, pair, 'python -c "import onnx"', INSPECT_LIMITS[adjective])
        if not code:
            beside = interleaved(ours, narrow, scale.short_repeats, warm=scale.warm)
            yield _time_row(what, beside, "the same graph, next to no weights", 1.1)
        load = python("-c", "import onnx, sys; onnx.load(sys.argv[1])", str(folder / "model.onnx"))
        loading = median_cost(load, scale.memory_repeats)
        figures = (f"{pair.ours:.3f} s", "onnx.load of the file", f"{loading:.3f} s", f"{pair.ours / loading:.2f}")
        yield Row(f"{what}: time", *figures)
        mine, other = (median_cost(command, scale.memory_repeats, peak_mib) for command in (ours, load))
        yield _memory_row(what, mine, other, "onnx.load of the file", 100)
        shutil.rmtree(folder)


def contract(scratch: Path, scale: Scale) -> Iterator[Row]:
    """Every node of a graph is followed; the time grows in proportion to the nodes."""
    for kind, description in KINDS.items():
        double = kind in ("merged", "numbered")
        layers = tuple(max(1, count // 2) for count in scale.layers) if double else scale.layers
        folders = [scratch / f"{kind}-{number}" for number in range(len(layers))]
        for count, folder in zip(layers, folders, strict=True):
            folder.mkdir()
            python(str(HERE / "graphs.py"), kind, str(count), str(folder)).run()
        few, some, many = (kvdoctor("contract", "--format", "json", str(folder)) for folder in folders)
        nodes = [f"{500 * count:,} nodes" for count in scale.layers]
        files = map(str, sorted(folders[1].iterdir()))
        pair = interleaved(some, python("-c", INFER, *files), scale.few_repeats, warm=scale.warm)
        what = f"contract, {description}, {layers[1]} layers: {nodes[1]}"
        figures = (f"{pair.ours:.2f} s", "onnx.load, infer_shapes", f"{pair.theirs:.2f} s", f"{pair.ratio:.2f}")
        yield Row(what, *figures, "3 s", pair.ours > 3)
        for size, command, limit in ((nodes[1], some, 2.2), (nodes[2], many, 4.4)):
            pair = interleaved(command, few, scale.few_repeats, warm=scale.warm)
            yield _time_row(f"contract, {description}, {size}", pair, nodes[0], limit)


def step_test(scratch: Path, scale: Scale) -> Iterator[Row]:
    """What kvdoctor adds to the runs themselves."""
    for name, where in (("beside", "external data"), ("inside", "weights inside")):
        folder = _make_model(f"{scale.medium}-{name}", scratch)
        ours, bare = kvdoctor("step-test", "--format", "json", str(folder)), _record_bare(folder, scratch)
        what = f"step-test, 100 million parameters, {where}"
        pair = interleaved(ours, bare, scale.long_repeats, warm=scale.warm)
        yield _time_row(what, pair, "bare script, same runs", 1.3)
        loops = _record_bare(folder, scratch, "--three-loops")
        pair = interleaved(ours, loops, scale.long_repeats, warm=scale.warm)
        yield _time_row(what, pair, "bare script, three loops", 3.0)
        pair = interleaved(ours, bare, scale.memory_repeats, peak_mib, warm=scale.warm)
        figures = (f"{pair.ours:.0f} MiB", "bare script, same runs", f"{pair.theirs:.0f} MiB", f"{pair.ratio:.2f}")
        yield Row(f"{what}: memory", *figures, "1.30", pair.ratio > 1.3)
        shutil.rmtree(folder)


EXTREMES = {
    "embeds-262k": "embeddings of 2,560, 262,144 words, 750 million parameters",
    "words-262k": "262,144 words, 270 million parameters",
    "slots-400": "400 slots, 170 million parameters",
    "1.2b-beside": "1.2 billion parameters",
}
GROWING = {
    "words": ("words", 65_536, ()),
    "layers": ("layers", 25, ()),
    "steps": ("tokens, every length of the context", 256, ("--thorough",)),
}


def extremes(scratch: Path, scale: Scale) -> Iterator[Row]:
    """A step-test costs in proportion to what is run, in whatever way a model is large."""
    for name in scale.extremes:
        folder = _make_model(name, scratch)
        ours, bare = kvdoctor("step-test", "--format", "json", str(folder)), _record_bare(folder, scratch)
        what = f"step-test, {EXTREMES.get(name, name)}"
        pair = interleaved(ours, bare, scale.memory_repeats, warm=scale.warm)
        yield _time_row(what, pair, "bare script, same runs", 1.3)
        pair = interleaved(ours, bare, 1, peak_mib, warm=False)
        figures = (f"{pair.ours:.0f} MiB", "bare script, same runs", f"{pair.theirs:.0f} MiB", f"{pair.ratio:.2f}")
        yield Row(f"{what}: memory", *figures, "1.30", pair.ratio > 1.3)
        shutil.rmtree(folder)
    for name in scale.growing:
        noun, count, options = GROWING.get(name, (name, 1, ()))
        commands = []
        for times in (1, 2, 4):
            (scratch / f"{times}").mkdir(exist_ok=True)
            model = f"{name}-{times}" if name in GROWING else name
            folder = _make_model(model, scratch / f"{times}")
            commands.append(kvdoctor("step-test", "--format", "json", *options, str(folder)))
        for times, command, limit in ((2, commands[1], 2.2), (4, commands[2], 4.4)):
            pair = interleaved(command, commands[0], scale.memory_repeats, warm=scale.warm)
            yield _time_row(f"step-test, {count * times:,} {noun}", pair, f"{count:,} {noun.partition(',')[0]}", limit)


def locate(scratch: Path, scale: Scale) -> Iterator[Row]:
    """A step-test of a faulty decoder, with the search for the node at fault, beside that of a sound one."""
    sound = _make_model(f"{scale.medium}-inside", scratch)
    healthy = kvdoctor("step-test", "--format", "json", str(sound))
    base = median_cost(healthy, scale.memory_repeats, peak_mib)
    for name, fault in (("fails", "a step that fails"), ("differs", "logits that differ")):
        folder = _make_model(f"{scale.medium}-{name}", scratch)
        faulty = kvdoctor("step-test", "--format", "json", str(folder), code=1)
        what = f"location of {fault}, 100 million parameters"
        pair = interleaved(faulty, healthy, scale.few_repeats, warm=scale.warm)
        yield _difference_row(what, pair, "a sound one, no search", 60)
        mine = median_cost(faulty, scale.memory_repeats, peak_mib)
        figures = (f"{mine:.0f} MiB", "a sound one, no search", f"{base:.0f} MiB", f"{mine / base:.2f}")
        yield Row(f"{what}: memory", *figures, "2.00", mine > 2 * base)
        if name == "differs":
            by_hand = python(str(HERE / "mark_all.py"), str(folder / "model.onnx"))
            cost = median_cost(by_hand, scale.memory_repeats)
            by_hand_text = "onnx.load, every value an output"
            yield Row(f"{what}: time", f"{pair.ours:.2f} s", by_hand_text, f"{cost:.2f} s", f"{pair.ours / cost:.2f}")
            size = median_cost(by_hand, scale.memory_repeats, peak_mib)
            yield _memory_row(what, mine, size, by_hand_text)
        shutil.rmtree(folder)


def polygraphy(scratch: Path, scale: Scale) -> Iterator[Row]:
    """The nearest other tool, on a decoder whose steps fail from a past of 4 tokens on."""
    if reason := peers.find_obstacle(offline=scale is SMALLEST):
        yield Row("step-test beside Polygraphy", "not measured", reason.splitlines()[0][:60])
        return
    folder = _make_model(f"{scale.medium}-fails", scratch)
    model = folder / "model.onnx"
    ours = kvdoctor("step-test", "--format", "json", str(folder), code=1)
    for theirs, what in (
        (peers.run(model), "run: finds nothing"),
        (peers.run_step(model), "run, shapes by hand: the error"),
        (peers.reduce(model, scratch), "debug reduce: ends in an error"),
    ):
        pair = interleaved(ours, theirs, scale.memory_repeats, warm=scale.warm)
        yield _time_row("step-test: the failing node", pair, f"Polygraphy {what}")
    shutil.rmtree(folder)


def fixture(scratch: Path, scale: Scale) -> Iterator[Row]:
    """A step-test of a model whose runs cost next to nothing."""
    ours = kvdoctor("step-test", "--format", "json", str(FIXTURE), code=1)
    pair = interleaved(ours, _record_bare(FIXTURE, scratch), scale.short_repeats, warm=scale.warm)
    yield _difference_row(f"step-test, fixture {FIXTURE.name}", pair, "bare script, same runs", 0.6)


PROCESSOR_LIMITS = {"gpt2": 2.2, FIXTURE.name: 1.5, "layers-2": 1.4, "layers-8": 1.2, "100m-beside": 1.15}
"""Times the processor time of the bare script, by model."""


def processor(scratch: Path, scale: Scale) -> Iterator[Row]:
    """Processor time: what an inspection adds to reading the file, and a step-test to its sessions and runs."""
    fixtures = {FIXTURE.with_name("gpt2"): 0, FIXTURE: 1}
    compare = partial(interleaved, repeats=scale.few_repeats, cost=processor_seconds, warm=scale.warm)
    made = {name: _make_model(name, scratch) for name in dict.fromkeys((*scale.deep, *scale.stepped))}
    large = _make_model(f"{scale.large}-inside", scratch / "large")
    for path, code in (*fixtures.items(), (large, 0)):
        ours = kvdoctor("inspect", "--format", "json", str(path), code=code)
        pair = compare(ours, python("-c", "import onnx"))
        yield _processor_row(f"inspect, {path.name}", pair, "import onnx", 2.0)
    shutil.rmtree(large)
    for name, limit in zip(scale.deep, (2.5, 4.0), strict=True):
        ours = kvdoctor("inspect", "--format", "json", str(made[name]))
        pair = compare(ours, python("-c", CHECK, str(made[name] / "model.onnx")))
        yield _processor_row(f"inspect, {MODELS[name].layers} layers", pair, "onnx.load, onnx.checker", limit)
    for path, code in (*fixtures.items(), *((made[name], 0) for name in scale.stepped)):
        ours = kvdoctor("step-test", "--format", "json", str(path), code=code)
        pair, limit = compare(ours, _record_bare(path, scratch)), PROCESSOR_LIMITS.get(path.name, 2.2)
        yield _processor_row(f"step-test, {path.name}", pair, "bare script, same runs", limit)


def _processor_row(what: str, pair: Pair, alternative: str, limit: float) -> Row:
    return replace(_time_row(what, pair, alternative, limit), what=f"{what}: processor time")


def re_export(scratch: Path, scale: Scale) -> Iterator[Row]:
    """Diagnosis, repair, second diagnosis and proof."""
    out = scratch / "repaired"
    cost = median_cost(kvdoctor("re-export", "--force", str(FIXTURE), "-o", str(out)), scale.long_repeats)
    yield Row(f"re-export, fixture {FIXTURE.name}: time", f"{cost:.2f} s", limit="aim: 3 s")
    for where in ("beside", "inside"):
        folder = scratch / f"ballast-{where}"
        folder.mkdir()
        python(str(HERE / "ballast.py"), where, str(folder), str(scale.large_bytes)).run()
        other = peak_mib(python("-c", LOAD_AND_SAVE, str(folder), str(scratch / "saved.onnx")))
        for options in ([], ["--cache-type", "int8"]):
            command = "convert" if options else "re-export"
            mine = peak_alone_mib(kvdoctor(command, "--force", *options, str(folder), "-o", str(out)))
            what = f"{' '.join([command, *options])}, {scale.size}, weights {where}, without the worker"
            yield _memory_row(what, mine, other, "onnx.load + onnx.save", 300)
        shutil.rmtree(folder)
        for left in scratch.glob("saved.onnx*"):
            left.unlink()


def unmerge(scratch: Path, scale: Scale) -> Iterator[Row]:
    """A merged decoder is converted to a pair without its weights being loaded."""
    for name, where in (("beside", "external data"), ("inside", "weights inside")):
        folder, script = _make_model(f"{scale.large}-{name}", scratch), str(HERE / "unmerge.py")
        python(script, "make", str(folder)).run()
        ours = python(script, "kvdoctor", str(folder), str(scratch / "pair"))
        other = python(script, "onnx", str(folder), str(scratch / "saved"))
        what = f"merged decoder to pair, {scale.size}, {where}"
        pair = interleaved(ours, other, scale.memory_repeats, warm=scale.warm)
        yield _time_row(what, pair, "onnx.load, onnx.save")
        mine, theirs = (median_cost(command, scale.memory_repeats, peak_mib) for command in (ours, other))
        yield _memory_row(what, mine, theirs, "onnx.load, onnx.save", 300)
        for made in (folder, scratch / "pair", scratch / "saved"):
            shutil.rmtree(made)


def gate_many(scratch: Path, scale: Scale) -> Iterator[Row]:
    """The gate on many small models: two jobs beside a loop, and a second time with nothing changed."""
    models = gate.make_models(scratch / "models", scale.gated_models, scale.warm)
    rounds = [gate.measure_round(models, scratch) for _ in range(scale.memory_repeats)]
    for what, alternative, ours, theirs, limit in (
        ("gate --jobs 2", "shell loop of single gates", [r.jobs for r in rounds], [r.loop for r in rounds], 3),
        ("gate again, nothing changed", "the first time", [r.again for r in rounds], [r.jobs for r in rounds], 20),
    ):
        pair = Pair.of(list(zip(theirs, ours, strict=True)))  # slow over fast: how many times as fast
        figures = (f"{pair.theirs:.2f} s", alternative, f"{pair.ours:.2f} s", f"{pair.ratio:.1f}")
        yield Row(
            f"{len(models)} small models, {what} (ratio: times as fast)", *figures, f"{limit}", pair.ratio < limit
        )


def loop(scratch: Path, scale: Scale) -> Iterator[Row]:
    """The time to write a loop; and in each language the loop beside a bare session that is fed the same."""
    model = _make_model(f"{scale.medium}-long", scratch)
    thin = model if scale.thin == scale.medium else _make_model(f"{scale.thin}-long", scratch)
    for what, path in ((f"fixture {LOOP_FIXTURE.name}", LOOP_FIXTURE), ("100 million parameters", model)):
        write = kvdoctor("loop", str(path), "--language", "rust", "--force", "-o", str(scratch / "written"))
        pair = interleaved(write, kvdoctor("step-test", str(path)), scale.memory_repeats, warm=scale.warm)
        figures = (f"{pair.ours:.2f} s", "kvdoctor step-test", f"{pair.theirs:.2f} s", f"{pair.ratio:.2f}")
        yield Row(f"loop, {what}: time to write it", *figures, "2 s", pair.ours > 2)
    for language in loops.LANGUAGES:
        try:
            programs = loops.prepare(language, model, scratch / "large")
            thin_programs = loops.prepare(language, thin, scratch / "thin")
        except loops.NotBuilt as reason:
            yield Row(f"loop, {language}", "not measured", str(reason)[:60])
            continue
        alternative = "bare session, same feeds"
        pair = loops.token_times(programs, model, scale.memory_repeats, scale.loop_blocks, steps=5)
        times = (f"{pair.ours * 1000:.1f} ms", alternative, f"{pair.theirs * 1000:.1f} ms", f"{pair.ratio:.2f}")
        yield Row(f"loop, {language}, 100 million parameters: a token", *times, "1.10", pair.ratio > 1.1)
        begin, end = scale.loop_steps
        cache = (end - begin) * loops.cache_bytes(MODELS[f"{scale.thin}-long"]) / MIB
        ours, theirs = (loops.growth(thin_programs, which, thin, begin, end) / MIB for which in ("loop", "bare"))
        sizes = (f"{ours:.1f} MiB", alternative, f"{theirs:.1f} MiB", f"{ours - theirs:+.1f} MiB")
        what = f"loop, {language}, {end - begin:,} steps, cache {cache:.0f} MiB: growth"
        yield Row(what, *sizes, f"+{cache / 10:.0f} MiB", ours - theirs > cache / 10)


def _make_model(name: str, scratch: Path) -> Path:
    folder = scratch / name
    folder.mkdir(parents=True)
    python(str(HERE / "models.py"), name, str(folder)).run()
    return folder


def _record_bare(folder: Path, scratch: Path, *which: str) -> Command:
    """The bare script with the plan of a step-test, and with the environment that kvdoctor gives its worker."""
    plan = scratch / "-".join((folder.name, *which, "plan.json"))
    record, bare = (str(HERE / name) for name in ("record.py", "bare.py"))
    Command((sys.executable, record, str(folder), str(plan), *which), environment=WORKER_ENVIRONMENT).run()
    return Command((sys.executable, bare, str(plan), str(folder)), environment=WORKER_ENVIRONMENT)


BENCHMARKS: dict[str, Callable[[Path, Scale], Iterator[Row]]] = {
    "start": start,
    "inspect": inspect,
    "contract": contract,
    "step-test": step_test,
    "extremes": extremes,
    "locate": locate,
    "polygraphy": polygraphy,
    "fixture": fixture,
    "processor": processor,
    "re-export": re_export,
    "unmerge": unmerge,
    "gate": gate_many,
    "loop": loop,
}
