"""Conversion of the stacks of an export: which can have the layout, and the new files in the place of the old.

The weights of what is converted are read from where they lie and written once.
"""

import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.contract import CacheContract
from kvdoctor.cure.splicing import write_model
from kvdoctor.errors import UsageError
from kvdoctor.layouts import DoesNotFit, Layout, Made, Source, load, new_name
from kvdoctor.layouts.naming import axis_names, name_axes, port_axes
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.out_folder import regular_files
from kvdoctor.patient import side_car_path
from kvdoctor.reading import read_contract
from kvdoctor.report.document import Change
from kvdoctor.skeleton import read_skeleton
from kvdoctor.stacks import StackFiles

NEW = ".kvdoctor-layout"
"""Where new files are made in OUT before they take the place of the old."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What is asked for: a layout by name, or None for the files as they are; readable axes; numbers not to exceed."""

    layout: str | None = None
    readable: bool = False
    ir_version: int | None = None
    opset: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to do."""
        return self.layout is not None or self.readable or self.lowers

    @property
    def lowers(self) -> bool:
        """Whether an IR version or an opset was asked for by number."""
        return self.ir_version is not None or self.opset is not None


@dataclass(frozen=True)
class Fitted:
    """One stack in its new layout; its models are used up when they are written, to the `files`."""

    stack: StackFiles
    contract: CacheContract
    layout: Layout
    made: Made
    files: tuple[str, ...]


def refuse_unknown(fit: Fit) -> None:
    """Refuse a layout that does not exist.

    Raises:
        UsageError: with all of them.
    """
    known = {layout.name: layout.explains for layout in load()}
    if fit.layout is not None and fit.layout not in known:
        listed = "; ".join(f"{name}: {explains}" for name, explains in known.items())
        raise UsageError(f"there is no layout {fit.layout!r}; there are {listed}")


def refuse_unfit(path: str, fit: Fit) -> None:
    """Refuse what no stack at a path can become, before any work is done.

    Raises:
        UsageError: with the reason for each stack.
    """
    layout = _named(fit)
    if layout is None:
        return
    folder = open_folder(path)
    reasons = {stack.name: _refused(layout, stack, read_contract(stack, folder.side_cars)) for stack in folder.stacks}
    if all(reasons.values()):
        raise _cannot(folder, layout, {name: reason for name, reason in reasons.items() if reason})
    _refuse_clashes(folder, layout, [stack for stack in folder.stacks if reasons[stack.name] is None])


def _named(fit: Fit) -> Layout | None:
    return next((layout for layout in load() if layout.name == fit.layout), None)


def _refused(layout: Layout, stack: StackFiles, contract: CacheContract | None) -> str | None:
    if contract is None or not contract.slots:
        return "its cache contract could not be read from the graph"
    if contract.missing:
        return f"its cache contract is not complete ({contract.missing[0].subject}: {contract.missing[0].reason})"
    return layout.refuses(stack, contract)


def _cannot(folder: ModelFolder, layout: Layout, reasons: dict[str, str]) -> UsageError:
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "there is no decoder with a cache"
    return UsageError(f"{folder.shown!r} cannot be given the layout {layout.name!r}: {listed}")


def fitted(folder: ModelFolder, contracts: dict[str, CacheContract | None], fit: Fit) -> tuple[Fitted, ...]:
    """Convert the stacks of a folder, as far as it needs no weights.

    Raises:
        UsageError: no stack can have the layout, or the files of two would have one name; the message says why.
    """
    layout = _named(fit)
    if layout is None:
        return ()
    reasons, done = {}, []
    for stack in folder.stacks:
        contract = contracts.get(stack.name)
        reason = _refused(layout, stack, contract)
        if reason is None and contract is not None:
            try:
                made = layout.make(Source(folder.root, stack, contract, fit.readable))
                done.append(Fitted(stack, contract, layout, made, tuple(made.models)))
            except DoesNotFit as error:
                reason = str(error)
        if reason is not None:
            reasons[stack.name] = reason
    if not done:
        raise _cannot(folder, layout, reasons)
    return tuple(done)


def _refuse_clashes(folder: ModelFolder, layout: Layout, stacks: list[StackFiles]) -> None:
    """Refuse to write over decoders that are no part of what is converted."""
    theirs = {file.name for stack in stacks for file in stack.files.values()}
    there = {file.name for file in folder.files} - theirs
    for stack in stacks:
        new = [new_name(folder.root, stack, stem) for stem in layout.writes]
        taken = next((name for name in new if name in there), None)
        if taken is not None:
            place, main = Path(folder.shown) / stack.main.name, stack.main.name
            raise UsageError(
                f"{folder.shown!r} holds {taken!r} already, beside {main!r}; to make it anew from the latter, give "
                f"that file: kvdoctor re-export {shlex.quote(str(place))} --layout {layout.name} -o OUT"
            )


def left_out(folder: ModelFolder, done: Iterable[Fitted]) -> frozenset[Path]:
    """The files of an export that have no place beside the new ones.

    Models, weights that no other model uses, and the list of its graphs that the exporter of transformers writes.
    """
    gone = {name for one in done for name in one.made.replaces}
    listing = side_car_path(folder, "export.json")
    stale = {listing} if gone and listing is not None else set()
    stay = {data.path for file in folder.files if file.name not in gone for data in file.external}
    data = {data.path for file in folder.files if file.name in gone for data in file.external}
    return frozenset({folder.root / name for name in gone} | (data - stay) | stale)


def put_in_place(done: Iterable[Fitted], root: Path, out: Path, gone: Iterable[Path]) -> None:
    """Write the new models, whose weights lie below `root`, into a folder; `gone` are files there to be removed.

    Raises:
        OSError: something cannot be read or written.
    """
    for one in done:
        one.made.write(root, out / NEW)
    for path in gone:
        if path.is_relative_to(out):  # a config above the models' folder may lie outside, and is the user's
            path.unlink(missing_ok=True)
    for path in [*regular_files(out / NEW)]:
        place = out / path.relative_to(out / NEW)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(out / NEW, ignore_errors=True)


def name_axes_readably(folder: ModelFolder, contracts: dict[str, CacheContract | None]) -> dict[str, list[Change]]:
    """Give the axes of every stack readable names in place, in a folder of our own; gives the changes by stack.

    Raises:
        OSError: something cannot be read or written.
    """
    changes: dict[str, list[Change]] = {}
    named = set[str]()
    for stack in folder.stacks:
        contract = contracts.get(stack.name)
        for file in stack.files.values() if contract is not None else ():
            if file.name in named or contract is None:
                continue
            named.add(file.name)
            model = read_skeleton(file.path, located=True).model
            axes = port_axes(contract, file.name)
            done = name_axes(model.graph, axes, axis_names(contract))
            if done:
                changes.setdefault(stack.name, []).append(Change(file.name, "axes", "", "; ".join(done)))
                write_model(model, file.path, file.path)
    return changes
