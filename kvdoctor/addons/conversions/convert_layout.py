"""Another layout for a copy that may just have been repaired: converted, diagnosed once more, and proved.

The weights of converted models are copied from file to file and written once.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from kvdoctor.addons.conversions.layout_proof import Source, prove_generation
from kvdoctor.addons.conversions.layouts.naming import axis_names, name_axes, port_axes
from kvdoctor.addons.conversions.layouts.registry import (
    ConvertedModels,
    DoesNotFit,
    Layout,
    LayoutSource,
    load,
)
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.stacks import OnnxFile, StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import LOOPS
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.errors import UsageError, as_argument
from kvdoctor.model.output_folder import copy_whole, regular_files, write_model
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.records import record
from kvdoctor.repair.lowering.lower import change_versions
from kvdoctor.repair.pipeline import diagnose_copy
from kvdoctor.repair.proof import equal, prove, prove_close, prove_loops, prove_no_new_finding
from kvdoctor.repair.session import Applied, Conversion, DiagnosisSide, Outcome, RepairSession
from kvdoctor.repair.workspace import CannotConvert, side_car_path
from kvdoctor.report.repair_record import Change, Proof

GENAI = "genai_config.json"
NEW = ".kvdoctor-layout"
"""The folder in OUT in which new files are written before they replace the old ones."""


REVEALED = {"sequence-axis-frozen": ("chunk-fails", "mask-not-offset", "positions-not-offset")}
"""Findings that a merged decoder may show when it is run with several new tokens, instead of one that the source has.

A merged decoder cannot declare an axis of one of its branches.
"""


@record(slots=False)
class ConvertedStack:
    """One stack in its new layout; its models are consumed when they are written to the `files`."""

    stack: StackFiles
    contract: CacheContract
    layout: Layout
    made: ConvertedModels
    files: tuple[str, ...]


def refuse_unknown_layout(request: ConvertChoices) -> None:
    """Refuse a layout that does not exist.

    Raises:
        UsageError: with all of them.
    """
    known = {layout.name: layout.explains for layout in load()}
    if request.layout is not None and request.layout not in known:
        listed = "; ".join(f"{name}: {explains}" for name, explains in known.items())
        raise UsageError(f"there is no layout {request.layout!r}; the layouts are {listed}")


def refuse_impossible_layout(path: str, request: ConvertChoices) -> None:
    """Refuse a layout that no stack at a path can have: the graphs are read, and nothing is run.

    Raises:
        CannotConvert: no stack can have it as it is, with the reason for each.
        UsageError: it cannot be asked for.
    """
    layout = _find_layout(request)
    if layout is None:
        return
    if layout.consumer and request.has_versions:
        raise UsageError(
            f"change the versions first, and give the copy the layout {layout.name!r}: it is proved as it is"
        )
    folder = open_folder(path)
    convert_layouts(folder, {one.name: read_contract(one, folder.side_cars) for one in folder.stacks}, request)


def _find_layout(request: ConvertChoices) -> Layout | None:
    return next((layout for layout in load() if layout.name == request.layout), None)


def _refuse_stack(layout: Layout, stack: StackFiles, contract: CacheContract | None) -> str | None:
    if contract is None or not contract.slots:
        return "its cache contract could not be read from the graph"
    if stack.parts:
        return f"the decoder is a pipeline of {len(stack.parts)} files"
    if contract.missing:
        return f"its cache contract is incomplete ({contract.missing[0].subject}: {contract.missing[0].reason})"
    return layout.refuse(stack, contract)


def convert_layouts(
    folder: ModelFolder, contracts: dict[str, CacheContract | None], request: ConvertChoices
) -> tuple[ConvertedStack, ...]:
    """Convert the stacks of a folder in memory, without their weights; nothing if no layout is asked for.

    Raises:
        CannotConvert: no stack can have the layout, with the reason for each.
        UsageError: several would have files of one name.
    """
    layout = _find_layout(request)
    if layout is None:
        return ()
    reasons, done = {}, []
    for stack in folder.stacks:
        try:
            done.append(convert_stack(folder, stack, contracts.get(stack.name), layout, request.axes == "readable"))
        except DoesNotFit as error:
            reasons[stack.name] = str(error)
    if not done:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "it holds no decoder with a cache"
        raise CannotConvert(f"{folder.shown!r} cannot be given the layout {layout.name!r}: {why}")
    _refuse_several(folder, layout, [one.stack.main.name for one in done])
    refuse_clashes(folder, [(one.stack, one.files) for one in done], f"--layout {layout.name}")
    return tuple(done)


def convert_stack(
    folder: ModelFolder, stack: StackFiles, contract: CacheContract | None, layout: Layout, readable: bool = False
) -> ConvertedStack:
    """Convert one stack in memory, without its weights.

    Raises:
        DoesNotFit: it cannot have the layout.
    """
    if (reason := _refuse_stack(layout, stack, contract)) is not None or contract is None:
        raise DoesNotFit(reason)
    made = layout.make(LayoutSource(folder.root, stack, contract, readable))
    return ConvertedStack(stack, contract, layout, made, tuple(made.models))


def _refuse_several(folder: ModelFolder, layout: Layout, names: list[str]) -> None:
    if layout.consumer and len(names) > 1:
        raise UsageError(
            f"{folder.shown!r} holds {len(names)} decoders ({', '.join(names[:3])}), and a folder for "
            f"{layout.consumer} holds one; {_advise_file(folder, names[0], f'--layout {layout.name}')}"
        )


def refuse_clashes(folder: ModelFolder, planned: Sequence[tuple[StackFiles, Sequence[str]]], option: str) -> None:
    """Refuse new files of stacks that have the name of a file that stays, or of a new one of another stack.

    Raises:
        UsageError: with the command that converts one stack alone.
    """
    theirs = {file.name for stack, _ in planned for file in stack.files.values()}
    owners = dict.fromkeys({file.name for file in folder.files} - theirs, "")
    for stack, names in planned:
        main = stack.main.name
        if (name := next((name for name in names if name in owners), None)) is not None:
            why = f"{main!r} would be written to the same files as {owners[name]!r}; to convert it alone"
            if not owners[name]:
                why = f"{folder.shown!r} already holds {name!r} next to {main!r}; to replace it by a conversion of it"
            raise UsageError(f"{why}, {_advise_file(folder, main, option)}")
        owners |= dict.fromkeys(names, main)


def _advise_file(folder: ModelFolder, name: str, option: str) -> str:
    return f"give the file: kvdoctor convert {as_argument(str(Path(folder.shown) / name))} {option} -o OUT"


def find_replaced_files(folder: ModelFolder, done: Iterable[ConvertedStack]) -> frozenset[Path]:
    """The files of an export that the new ones replace.

    Models, weights that no other model uses, the list of graphs that the exporter of transformers writes, and the
    config of onnxruntime-genai, which names a file that is gone.
    """
    gone = {name for one in done for name in one.made.replaces}
    listing = side_car_path(folder, "export.json")
    stale = {listing} if gone and listing is not None else set()
    stale |= {path for one in done if (path := find_stale_config(folder, one)) is not None}
    stay = {data.path for file in folder.files if file.name not in gone for data in file.external}
    data = {data.path for file in folder.files if file.name in gone for data in file.external}
    return frozenset({folder.root / name for name in gone} | (data - stay) | stale)


def find_stale_config(folder: ModelFolder, one: ConvertedStack) -> Path | None:
    """The genai_config.json that describes a converted stack, and nothing of its new layout."""
    path, named = side_car_path(folder, GENAI), cast("Any", folder.side_cars.genai)
    for key in ("model", "decoder", "filename"):
        named = named.get(key) if isinstance(named, dict) else None
    gone = {Path(name).name for name in one.made.replaces} - {Path(name).name for name in one.files}
    return path if isinstance(named, str) and named in gone and GENAI not in one.made.texts else None


def put_in_place(done: Iterable[ConvertedStack], root: Path, out: Path, gone: Iterable[Path]) -> None:
    """Write the new models, whose weights lie below `root`, into a folder; `gone` are files there to remove.

    Raises:
        UsageError: one of them would be written over a file that stays.
        OSError: something cannot be read or written.
    """
    for one in done:
        one.made.write(root, out / NEW)
    for path in gone:
        if path.is_relative_to(out):  # a config above the models' folder may lie outside, and is the user's
            path.unlink(missing_ok=True)
    texts = {out / name for one in done for name in one.made.texts}
    for path in [*regular_files(out / NEW)]:
        place = out / path.relative_to(out / NEW)
        if place.exists() and place not in texts:
            raise UsageError(f"{place.name!r} would be written over a file that stays: convert a folder without it")
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(out / NEW, ignore_errors=True)


VERSIONS = Conversion("versions", "IR version and opset are lowered or raised to the numbers asked for, node by node.")
AXES = Conversion("axes readable", "Open axes get the names that Optimum writes.")


def apply_layout(
    session: RepairSession, request: ConvertChoices, outcome: Outcome, ready: tuple[ConvertedStack, ...] = ()
) -> Outcome:
    """Give the copy its layout, diagnose it and prove it; an unproved copy stays as it is.

    `ready` are the stacks of the original in the new layout, where nothing was repaired before.

    Raises:
        UsageError: no stack can have the layout, or no axis is left to rename.
        CannotChangeVersion: the model has no form of the IR version or opset.
    """
    if not request.has_layout or (outcome.applied and not outcome.holds):
        return outcome
    if request.layout is not None:
        outcome = _convert(session, request, outcome, ready)
    elif request.axes == "readable":
        contracts = outcome.after.contracts
        named = _change_files(session, session.model, outcome, AXES, partial(_name_axes, contracts=contracts))
        if named is outcome and not outcome.applied:
            raise UsageError(f"the open axes of {session.folder.shown!r} already have the names that Optimum gives")
        outcome = named
    if not request.has_versions:
        return outcome
    model = session.model if request.layout is None else "."
    to = request.ir_version, request.opset
    return _change_files(session, model, outcome, VERSIONS, lambda _, file, one: change_versions(one, *to, file.name))


def _change_files(
    session: RepairSession,
    model: str,
    outcome: Outcome,
    conversion: Conversion,
    change: Callable[[StackFiles, OnnxFile, ModelProto], Sequence[Change]],
) -> Outcome:
    """The copy with the models of each stack changed in place; the same outcome where there is nothing to change.

    Raises:
        OSError: something cannot be read or written.
    """
    done, applied = set[str](), []
    for stack in session.open_copy(model).stacks:
        changes = list[Change]()
        for file in stack.files.values():
            if file.name in done or file.view is None:
                continue
            skeleton = read_skeleton(file.path, located=True).model
            if made := change(stack, file, skeleton):
                done.add(file.name)
                write_model(skeleton, file.path, file.path)
                changes += made
        if changes:
            applied.append(Applied(stack.name, conversion, tuple(changes)))
    if not applied:
        return outcome
    after = diagnose_copy(session, model)
    return outcome.extended(after, applied, prove(applied, outcome.after, after, {}))


def _name_axes(
    stack: StackFiles, file: OnnxFile, model: ModelProto, contracts: Mapping[str, CacheContract | None]
) -> list[Change]:
    """Files and names of inputs and outputs stay as they are."""
    contract = contracts.get(stack.name)
    if contract is None:
        return []
    done = name_axes(model.graph, port_axes(contract, file.name), axis_names(contract))
    return [Change(file.name, "axes", "", "; ".join(done))] if done else []


def _convert(
    session: RepairSession, request: ConvertChoices, outcome: Outcome, ready: tuple[ConvertedStack, ...]
) -> Outcome:
    if ready:
        put_in_place(ready, session.folder.root, session.at, ())
    else:
        copy = replace(session.open_copy(), shown=session.folder.shown)
        ready = convert_layouts(copy, outcome.after.contracts, request)
        put_in_place(ready, copy.root, copy.root, find_replaced_files(copy, ready))
    for one in ready:
        for name in one.layout.beside:  # of a folder everything is copied already
            source = side_car_path(session.folder, name)
            if source is not None and not (session.at / name).exists():
                copy_whole(source, session.at / name)
        if find_stale_config(session.folder, one) is not None:
            one.made.changes.append(Change(GENAI, "file", "names a file that is gone", "left out"))
    after = diagnose_copy(session)
    proof = [entry for one in ready for entry in _prove_conversion(session, one, outcome, after)]
    applied = [Applied(one.stack.name, one.layout.conversion(one.made), tuple(one.made.changes)) for one in ready]
    return outcome.extended(after, applied, proof)


def _prove_conversion(
    session: RepairSession, one: ConvertedStack, outcome: Outcome, after: DiagnosisSide
) -> Iterator[Proof]:
    before = outcome.after
    stack = next((s.name for s in after.report.stacks if set(s.files) & set(one.files)), None)
    if stack is None:
        yield Proof(one.stack.name, f"the layout {one.layout.name} is read as a stack", False, "no stack was found")
        return
    yield from prove_loops(stack, after)
    revealed = {name for finding in before.report.findings for name in REVEALED.get(finding.name, ())}
    yield prove_no_new_finding(stack, before.report, after.report, revealed)
    yield _compare_loops(one, stack, before, after)
    if one.layout.consumer:
        # The loop whose tokens must be generated: that of the original, or of the copy where that one was faulty.
        name, copy = one.stack.name, after.contract(stack)
        source = Source(name, session.folder.root, session.before.contract(name) or one.contract, "the original")
        passed = any((run := session.before.run(name, loop)) and run.outcome == "passed" for loop in LOOPS)
        if copy is not None and not (passed and session.before.contract(name) is not None):
            source = Source(stack, session.at, copy, "the repaired copy")
        yield from prove_generation(session, stack, source)


def _compare_loops(one: ConvertedStack, stack: str, before: DiagnosisSide, after: DiagnosisSide) -> Proof:
    # Those of the held loop, or of the plain loop where there is no held one.
    sides = ((before, one.stack.name), (after, stack))
    old, new = (
        next((found for loop in reversed(LOOPS) if (found := side.read_logits(name, loop)) is not None), None)
        for side, name in sides
    )
    claim = "the loop's logits are those of the source"
    if old is None or new is None or old.shape != new.shape:
        return Proof(stack, claim, False, "no logits to compare: one of the loops did not run to its end")
    if equal(old, new):
        return Proof(stack, f"{claim}, bit for bit", True, f"{old.size} numbers")
    width = one.contract.vocabulary or old.size
    limit = find_tolerance(one.contract.exactness, after.tolerances)
    return prove_close(Proof(stack, claim, False), new.reshape(1, -1, width), old.reshape(1, -1, width), limit)
