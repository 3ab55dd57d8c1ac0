"""The steps of `kvdoctor loop`: read the contract, run the loop, write the project, build it and hold it to vectors."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor._version import __version__
from kvdoctor.addons.loops.check import VectorResult, check
from kvdoctor.addons.loops.languages import LANGUAGES, Language
from kvdoctor.addons.loops.make_plan import make_plan
from kvdoctor.addons.loops.plan import CannotBuild, NoLoop
from kvdoctor.addons.loops.project import DEFAULT_NAME, Project, make_files, refuse_name
from kvdoctor.addons.loops.vectors import LoopTarget, ObservedLoop, Vector, observe
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.readings import with_given
from kvdoctor.contract import CacheContract
from kvdoctor.diagnose.examine import list_thresholds, settle_after, settle_unknown
from kvdoctor.diagnose.inspection import build_context
from kvdoctor.diagnose.not_checked import find_unmet_preconditions
from kvdoctor.errors import UsageError, as_argument, did_you_mean
from kvdoctor.model.output_folder import LOOP_MARK, refuse_unfit, whole_folder
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder

SCHEMA = "kvdoctor/loop/1"


@record
class LoopRequest:
    """The input of `loop`.

    Attributes:
        path: The model.
        out: The folder to write; None to write nothing, where only a check was asked for.
        language: A name of `LANGUAGES`.
        stack: The stack to write a loop for; None for the first one that there is a loop for.
        force: Replace a folder that kvdoctor wrote.
        check: Build the project and run it.
        name: Of the crate, module, package or namespace; None for `decode_loop`.
    """

    path: str
    out: str | None
    language: str
    stack: str | None = None
    force: bool = False
    check: bool = False
    name: str | None = None


@record
class WrittenLoop:
    """The result of `loop`.

    Attributes:
        model: The model.
        stack: The stack; None where no loop was found for any.
        language: The language.
        out: The folder that was written; None where nothing was.
        files: What lies in it.
        reason: Why there is no loop.
        unchecked: Why its program could not be checked.
        remarks: What to know about the loop.
        results: What the program did on each test vector.
        exit_code: 0: written, and what was asked for was shown. 1: the model or the program decodes wrong tokens. 3:
            there is no loop, or it could not be checked.
    """

    model: str
    stack: str | None
    language: str
    out: str | None = None
    files: tuple[str, ...] = ()
    reason: str | None = None
    unchecked: str | None = None
    remarks: tuple[str, ...] = ()
    results: tuple[VectorResult, ...] = ()
    exit_code: int = 0


def write_loop(request: LoopRequest, options: Options) -> WrittenLoop:
    """Write a decode loop for a model into a folder, and check it where that was asked for.

    Raises:
        UsageError: there is nothing at the path, or `out` must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    language = find_language(request.language)
    if request.out is None and not request.check:
        raise UsageError("give the folder for the program with -o OUT, or --check to try it without writing one")
    if request.name is not None:
        refuse_name(request.name)
    if options.reference is not None and not request.check:
        raise UsageError("--reference compares the program with a checkpoint: give --check as well")
    if request.out is not None and Path(request.path).exists():
        refuse_unfit(Path(request.out), Path(request.path), request.force)
    with Runtime(options.limits) as runtime:
        folder = open_folder(request.path)
        try:
            read = {stack.name: read_contract(stack, folder.side_cars) for stack in folder.stacks}
            given = with_given(read, options.feed, options.logits_output)
            contexts = [build_context(folder, stack, given[stack.name], options) for stack in folder.stacks]
            contracts = {one.stack.name: settle_unknown(one, options, runtime)[0] for one in contexts}
            target = _choose(folder, request.stack, language, contracts)
            observed = observe(target, options, runtime)
            context = next(replace(one, contract=target.contract) for one in contexts if one.stack.name == target.stack)
            runs = () if observed.held is None else (observed.held,)
            if (again := settle_after(context, runs, False, options, runtime)) is not None:
                target = _choose(folder, target.stack, language, {**contracts, target.stack: again})
                observed = observe(target, options, runtime)
        except NoLoop as reason:
            return WrittenLoop(folder.shown, None, language.name, reason=str(reason), exit_code=3)
    made = WrittenLoop(folder.shown, target.stack, language.name)
    if (refusal := _refuse(observed, folder.shown)) is not None:
        return replace(made, reason=refusal[0], exit_code=refusal[1])
    return _write(request, made, target, observed, options.timeout)


def _write(
    request: LoopRequest, made: WrittenLoop, target: LoopTarget, observed: ObservedLoop, seconds: float
) -> WrittenLoop:
    """Write the project, and check it there before it gets its place."""
    project = Project(find_language(request.language), target, observed, request.name or DEFAULT_NAME)
    with _place(request.out) as (place, keep):
        for name, text in make_files(project).items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text, encoding="utf-8", newline="\n")
        for vector in observed.vectors:
            if vector.source is not None:
                vector.source.tofile(place / str(vector.source_file))
        (place / LOOP_MARK).write_text(_mark(place, made), encoding="utf-8", newline="\n")
        written = tuple(sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()))
        made = replace(made, out=request.out, files=written, remarks=tuple(_remarks(observed, target)))
        if request.check:
            made = _checked(made, place, target.folder, observed.vectors, seconds)
            if observed.uncompared is not None and made.exit_code == 0:
                made = replace(made, unchecked=observed.uncompared, exit_code=3)
        if made.exit_code != 1:
            keep()
            return made
    return replace(made, out=None, files=(), reason="the program finds other tokens than the model means")


def _checked(made: WrittenLoop, place: Path, model: Path, vectors: tuple[Vector, ...], seconds: float) -> WrittenLoop:
    """The result with what a copy of the project did: what a build leaves does not belong into the user's folder."""
    if not any(vector.decided for vector in vectors):
        reason = "in no call without a cache one token is clearly likelier than the others"
        return replace(made, unchecked=reason, exit_code=3)
    with scratch_folder() as scratch:
        project = shutil.copytree(place, Path(scratch) / "loop")
        try:
            results = check(project, model, find_language(made.language), vectors, seconds)
        except CannotBuild as error:
            return replace(made, unchecked=str(error), exit_code=3)
    made = replace(made, results=results)
    if any(result.differs for result in results):
        return replace(made, exit_code=1)
    stopped = next((result.problem for result in results if result.problem), None)
    return made if stopped is None else replace(made, unchecked=stopped, exit_code=3)


@contextmanager
def _place(out: str | None) -> "Iterator[tuple[Path, Callable[[], None]]]":
    """A folder to fill, and the function that marks it as complete."""
    if out is None:
        with scratch_folder() as scratch:
            yield Path(scratch), lambda: None
        return
    with whole_folder(Path(out)) as pending:

        def keep() -> None:
            pending.kept = True

        yield pending.path, keep


OTHER_NAMES = {"js": "javascript", "node": "javascript", "ts": "typescript", "py": "python", "rs": "rust"}
OTHER_NAMES |= {"golang": "go", "c++": "cpp", "cxx": "cpp"}


def find_language(name: str) -> Language:
    """The language of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in LANGUAGES:
        meant = did_you_mean(OTHER_NAMES.get(name.lower(), name.lower()), LANGUAGES)
        raise UsageError(f"there is no loop in {name!r}{'; ' if meant else ''}{meant}; it takes {', '.join(LANGUAGES)}")
    return LANGUAGES[name]


def _choose(
    folder: ModelFolder, name: str | None, language: Language, contracts: Mapping[str, CacheContract]
) -> LoopTarget:
    """The first stack that there is a loop for.

    Raises:
        NoLoop: there is none.
        UsageError: there is no stack of that name.
    """
    if name is not None and name not in {stack.name for stack in folder.stacks}:
        names = ", ".join(stack.name for stack in folder.stacks) or "no stack"
        raise UsageError(f"there is no stack {name!r} in {folder.shown}; it has {names}")
    reasons = []
    for stack in folder.stacks:
        if name in (None, stack.name):
            contract = contracts[stack.name]
            unmet = None if contract.missing else next(find_unmet_preconditions(stack, contract), None)
            if sequences := [name for file in stack.members for name in file.sequences]:
                unmet = f"{' and '.join(sequences)} are sequences of tensors, for which there is no loop yet"
            try:
                plan = make_plan(contract, folder.root.name)
                unmet = unmet or language.refuses(plan)
            except NoLoop as error:
                unmet = unmet or "; ".join((str(error), *stack.remarks, *(problem.cause for problem in stack.problems)))
            if unmet is None:
                external = {one.name: tuple(data.location for data in one.external) for one in folder.files}
                lengths = tuple(one.length for one in list_thresholds(stack, contract))
                return LoopTarget(stack.name, folder.root, contract, plan, external, folder.side_cars, lengths)
            reasons.append(f"{stack.name}: {unmet}")
    reasons += [f"{file.name} cannot be read: {file.problem}" for file in folder.files if file.problem is not None]
    raise NoLoop("; ".join(reasons) or f"no decoder with a KV cache in {folder.shown}; `kvdoctor inspect` says what is")


def _refuse(observed: ObservedLoop, shown: str) -> tuple[str, int] | None:
    """Why a loop must not be written, and the exit code: the model is faulty, or could not be run."""
    run = observed.held
    if run is None:
        return f"the model could not be run: {observed.obstacle or 'no experiment ran'}", 3
    if run.outcome in ("failed", "differs", "died"):
        what = "decodes wrong tokens" if run.outcome == "differs" else "fails"
        how = {"failed": f"fails at step {run.failed_step}", "died": "ends the process"}.get(run.outcome, "differs")
        return (
            f"the model {what} in a right loop too ({run.experiment} {how}); "
            f"`kvdoctor step-test {as_argument(shown)}` names the cause and the repair"
        ), 1
    if run.outcome == "skipped":
        return f"the loop could not be run: {run.reason}", 3
    return None


def _remarks(observed: ObservedLoop, target: LoopTarget) -> Iterator[str]:
    yield from observed.remarks
    graphs = target.contract.graphs.values()
    for name in dict.fromkeys(port.name for graph in graphs for port in graph.inputs if port.role == "features"):
        yield f"input {name!r} is for images or audio, which this loop does not take"
    plain = observed.plain
    if plain is not None and plain.outcome in ("failed", "differs", "died") and plain is not observed.held:
        yield (
            "feeding every present back fails with this export; this loop keeps the cross-attention cache of the first "
            "call, which is right before and after a repair"
        )
    if observed.held is not None and observed.held.outcome in ("ambiguous", "inconclusive"):
        yield "the model rounds so much that the runs could not decide whether the loop is right"


def _mark(place: Path, made: WrittenLoop) -> str:
    """The content of `kvdoctor-loop.json`, which marks the folder as written by kvdoctor."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": {"name": "kvdoctor", "version": __version__},
        "language": made.language,
        "stack": made.stack,
        "sha256": {
            path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(place.rglob("*"))
            if path.is_file()
        },
    }
    return json.dumps(document, indent=2) + "\n"
