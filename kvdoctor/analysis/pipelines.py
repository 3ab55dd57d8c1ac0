"""Finds decoders that are cut into stages: files that run one after the other, each with the caches of its own layers.

genai_config.json lists the stages of a `decoder-pipeline`, and hands a value on by its name. Elsewhere the interface
tells: the first stage takes tokens or embeddings and returns hidden states, each later one takes those of the stage
before it, the last one returns logits. Layer numbers give the order. Sources: onnxruntime-genai, src/config.h and
src/models/decoder_only_pipeline.cpp.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.configs import read_part
from kvdoctor.analysis.dialects.dialect import CACHE_LIKE, INPUTS, find_dialect
from kvdoctor.analysis.embedding_graphs import VARIANT
from kvdoctor.analysis.port_roles import FLOATS, INTEGERS, role_by_name
from kvdoctor.analysis.stacks import OnnxFile, PartProblem, StackFiles, has_named_logits
from kvdoctor.contract import Stage, describe
from kvdoctor.model.join import CannotJoin, PartToJoin, join_models
from kvdoctor.model.view import Declared, GraphView
from kvdoctor.records import record

TOKEN_RANK = 2
"""Of int64[batch, new]."""
HIDDEN_RANK = 3
"""Of float[batch, new, hidden]."""
PRESENT_LIKE = ("present", "past", "cache", "new_")
ONE_PHASE = ("run_on_prompt", "run_on_token_gen")


@record(slots=False)
class StageFile:
    """A file that may be a stage: the numbers of its layers, and what it takes from and gives to other stages."""

    file: OnnxFile
    layers: tuple[int, ...]
    takes: tuple[Declared, ...]
    gives: tuple[Declared, ...]
    is_first: bool
    is_last: bool


def find_pipelines(files: Sequence[OnnxFile], genai: dict[str, Any]) -> Iterator[StackFiles]:
    """The pipelines among some files: that of genai_config.json, else the one that the interfaces show.

    Where the same layers have a stage for the prompt and one for later steps, each has a cache contract of its own.
    """
    listed = _listed_stages(genai)
    if listed:
        if not all(any(stage.get(key) is False for stage in listed) for key in ONE_PHASE):
            yield from _read_listed(files, listed)
        return
    found = [stage for file in files if (stage := _read_stage(file)) is not None]
    rest = [file for file in files if file.view is not None and file.name not in {stage.file.name for stage in found}]
    for suffix in sorted({_variant(stage) for stage in found}):
        for chain in _group_by_layers([stage for stage in found if _variant(stage) == suffix]):
            yield _chain(chain, rest, suffix.replace("_", "-"))


def _variant(stage: StageFile) -> str:
    """The end of a name that says how the weights are stored: `_q4`."""
    found = VARIANT.search(stage.file.path.stem)
    return found[0] if found else ""


def _read_stage(file: OnnxFile) -> StageFile | None:
    """A file as a stage; None where it is a whole decoder, or no part of one."""
    view = file.view
    if view is None or view.branches is not None or file.role not in ("decoder", "decoder-with-past", "other"):
        return None
    dialect = find_dialect(view.inputs)
    slots = {slot.past: slot for slot in dialect.find_slots(view.inputs)} if dialect else {}
    layers = sorted({slot.layer for slot in slots.values() if slot.layer is not None})
    is_last = has_named_logits(view)
    roles = {name: role_by_name(port, INPUTS) for name, port in view.inputs.items()}
    is_first = any(role in ("token_ids", "token_and_position", "embeddings") for role in roles.values())
    unnamed = [port for port in view.inputs.values() if roles[port.name] is None and port.name not in slots]
    is_first = is_first or any(port.dtype in INTEGERS and len(port.shape or ()) == TOKEN_RANK for port in unnamed)
    takes = tuple(p for p in view.inputs.values() if p.name not in slots and _is_hidden(p) and roles[p.name] in TAKEN)
    kept = {slot.present for slot in slots.values()}
    gives = tuple(p for p in view.outputs.values() if p.name not in kept and _is_hidden(p) and p.name != "logits")
    if (is_first and is_last) or not (layers or (is_last and len(takes) == 1)) or not (takes or gives):
        return None
    if not is_first and not takes:
        return None
    return StageFile(file, tuple(layers), () if is_first else takes, () if is_last else gives, is_first, is_last)


TAKEN = (None, "encoder_states", "embeddings")
"""Roles that the name of hidden states may suggest: `hidden_states` is also what an encoder returns."""


def _is_hidden(port: Declared) -> bool:
    is_state = CACHE_LIKE.match(port.name) or port.name.startswith(PRESENT_LIKE)
    return port.dtype in FLOATS and len(port.shape or ()) == HIDDEN_RANK and not is_state


def _group_by_layers(stages: Sequence[StageFile]) -> Iterator[list[StageFile]]:
    """Stages in the order of their layers: the head, which has none, last. None where several have the same layers.

    A last stage alone, whose layers do not begin at the first, is what is left of a pipeline. One in the middle may be
    diagnosed by itself: nobody takes it for a whole decoder.
    """
    caching = sorted((stage for stage in stages if stage.layers), key=lambda stage: stage.layers)
    heads = [stage for stage in stages if not stage.layers]
    numbers = [number for stage in caching for number in stage.layers]
    if not caching or len(set(numbers)) != len(numbers) or sum(stage.is_last for stage in stages) > 1:
        return
    is_rest = caching[0].is_last and not caching[0].is_first and caching[0].layers[0] > 0
    if len(caching) + len(heads) > 1 or is_rest:
        yield [*caching, *heads]


def _chain(stages: list[StageFile], others: Sequence[OnnxFile], tail: str) -> StackFiles:
    """The stack of stages in their order, with what keeps them from being one decoder."""
    problems = [*_find_gaps(stages, others)]
    parts = []
    for number, stage in enumerate(stages):
        links: dict[str, tuple[int, str]] = {}
        if number:
            before = stages[number - 1]
            pairs = _pair(stage.takes, before.gives) or None
            if pairs is None and not problems:
                problems.append(_misfit(before.file.name, before.gives, stage.file.name, stage.takes))
            links = {name: (number - 1, output) for name, output in (pairs or {}).items()}
        parts.append((stage.file, links))
    return _join(parts, tuple(problems[:1]), tail)


def _pair(takes: Sequence[Declared], gives: Sequence[Declared]) -> dict[str, str] | None:
    from kvdoctor.decode.embeddings import pair_tensors  # loads numpy

    return pair_tensors(takes, gives, _fits)


def _fits(taken: Declared, given: Declared) -> bool:
    """Whether two tensors have the same element type and, where both are numbers, the same width."""
    widths = [as_number((port.shape or (None,))[-1]) for port in (given, taken)]
    known = all(isinstance(width, int) for width in widths)
    return given.dtype == taken.dtype and (not known or widths[0] == widths[1])


def _find_gaps(stages: Sequence[StageFile], others: Sequence[OnnxFile]) -> Iterator[PartProblem]:
    """Stages that are missing at the beginning, in between and at the end; `others` may make the first embeddings."""
    numbers = [number for stage in stages for number in stage.layers]
    names = " and ".join(stage.file.name for stage in stages)
    first, last = stages[0], stages[-1]
    lacking = sorted(set(range(max(numbers))) - set(numbers))
    if lacking:
        after = [stage for stage in stages if stage.layers and stage.layers[-1] < lacking[0]]
        before = [stage for stage in stages if stage.layers and stage.layers[0] > lacking[0]]
        subject = before[0].file.name if before else last.file.name
        where = f"between {after[-1].file.name} and {subject}" if after else f"before {subject}"
        numbered = f"layer{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking[:8]))}"
        observed = f"no file has the cache of {numbered}"
        yield PartProblem(subject, "a stage for every layer", observed, f"a stage of the pipeline is missing {where}")
    elif not first.is_first and not any(_pair(first.takes, list(file.graph.outputs.values())) for file in others):
        subject, taken = first.file.name, _described(first.takes)
        observed = f"{subject} takes {taken}, and no file returns it"
        yield PartProblem(subject, "a first stage, of tokens or embeddings", observed, "the first stage is missing")
    # Logits without a usual name are of another width than the hidden states that stages take.
    elif not last.is_last and any(_fits(g, taken) for g in last.gives for stage in stages for taken in stage.takes):
        subject = last.file.name
        observed = f"{subject} returns {_described(last.gives)}, and no file of {names} returns logits"
        yield PartProblem(subject, "a last stage, with logits", observed, "the last stage of the pipeline is missing")


def _misfit(before: str, gives: Sequence[Declared], after: str, takes: Sequence[Declared]) -> PartProblem:
    declared, observed = f"{before} returns {_described(gives)}", f"{after} takes {_described(takes)}"
    return PartProblem(after, declared, observed, f"{declared}, and {observed}")


def _described(ports: Sequence[Declared]) -> str:
    return ", ".join(f"{port.name} {describe(port.dtype, port.shape)}" for port in ports) or "no hidden states"


def _join(
    parts: Sequence[tuple[OnnxFile, Mapping[str, tuple[int, str]]]], problems: tuple[PartProblem, ...], tail: str = ""
) -> StackFiles:
    """The stack of a pipeline. Where something keeps it from being one decoder, its first stage stands for it."""
    files = tuple(file for file, _ in parts)
    main, stages = replace(files[0], role="decoder"), tuple[Stage, ...]()
    if not problems:
        try:
            listed = [PartToJoin(f.name, f.graph.model, links, _states(f.graph)) for f, links in parts]
            joined, stages = join_models(listed)
        except CannotJoin as reason:
            problems = (PartProblem(files[0].name, "stages that can be read as one graph", str(reason), str(reason)),)
        else:
            name = " + ".join(file.name for file in files)
            main = OnnxFile(files[0].path, name, "decoder", view=GraphView(joined))
    return StackFiles(
        "pipeline" + tail, "decoder-only", {"decoder": main}, parts=files, stages=stages, problems=problems
    )


def _states(view: GraphView) -> frozenset[str]:
    """Inputs that keep a state, each stage its own: other inputs of one name are fed the same value."""
    dialect = find_dialect(view.inputs)
    named = {slot.past for slot in dialect.find_slots(view.inputs)} if dialect else set()
    return frozenset(named | {name for name in view.inputs if CACHE_LIKE.match(name) and view.inputs[name].shape})


def _listed_stages(genai: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of `model.decoder.pipeline`: a list of objects, each with its stages by their names."""
    listed, found = read_part(read_part(genai, "model"), "decoder").get("pipeline"), []
    for entry in listed if isinstance(listed, list) else []:
        for name, stage in entry.items() if isinstance(entry, dict) else ():
            if isinstance(stage, dict) and isinstance(stage.get("filename"), str):
                found.append({**stage, "name": str(name)})
    return found


def _read_listed(files: Sequence[OnnxFile], listed: Sequence[dict[str, Any]]) -> Iterator[StackFiles]:
    """The pipeline of genai_config.json. One with stages of the prompt or of later steps alone is not joined."""
    by_name = {file.name: file for file in files if file.view is not None}
    parts: list[tuple[OnnxFile, dict[str, tuple[int, str]]]] = []
    problems = []
    made: dict[str, tuple[int, str]] = {}
    for stage in listed:
        file = by_name.get(posixpath.normpath(stage["filename"]))
        if file is None:
            key = f"model.decoder.pipeline, stage {stage['name']}"
            observed = f"no file of that name that can be read, only {', '.join(by_name) or 'none'}"
            declared = f"genai_config.json, {key}: {stage['filename']}"
            cause = f"genai_config.json names {stage['filename']} as a stage of the pipeline, and it is missing"
            problems.append(PartProblem(stage["filename"], declared, observed, cause))
            continue
        problems += _find_strange_names(file, stage)
        links = {name: made[name] for name in file.graph.inputs if name in made and name not in _states(file.graph)}
        forwarded = read_part(stage, "output_names_forwarder")
        for output in file.graph.outputs:
            made[str(forwarded.get(output, output))] = (len(parts), output)
        parts.append((file, links))
    if not parts:
        return
    if any(stage.get(key) is False for stage in listed for key in ONE_PHASE):
        reason = "genai_config.json has stages that run on the prompt alone, or on later steps alone"
        problems.append(PartProblem(parts[0][0].name, "", "", reason, essential=False))
    elif not problems:
        problems += _find_unlinked(parts, made)
    yield _join(parts, tuple(problems[:1]))


def _find_strange_names(file: OnnxFile, stage: dict[str, Any]) -> Iterator[PartProblem]:
    """Inputs and outputs that the config lists for a stage and the file does not have."""
    for key, ports in (("inputs", file.graph.inputs), ("outputs", file.graph.outputs)):
        listed = stage.get(key)
        names = listed if isinstance(listed, list) else []
        strange = [name for name in names if isinstance(name, str) and name not in ports]
        if strange:
            declared = (
                f"genai_config.json, model.decoder.pipeline, stage {stage['name']}, {key}: {', '.join(strange[:4])}"
            )
            observed = f"{file.name} has the {key} {', '.join(list(ports)[:8])}"
            cause = f"genai_config.json lists {key} {', '.join(strange[:4])} of {file.name}, which it does not have"
            yield PartProblem(file.name, declared, observed, cause)


def _find_unlinked(
    parts: Sequence[tuple[OnnxFile, Mapping[str, tuple[int, str]]]], made: Mapping[str, tuple[int, str]]
) -> Iterator[PartProblem]:
    """Hidden states that no earlier stage returns under the name that a stage takes, or of another type or width.

    `made` has each name that a stage returns, with its number and output. If the first stage takes what a later one
    returns, they are listed in another order than they run.
    """
    for number, (file, links) in enumerate(parts):
        for port in file.graph.inputs.values():
            if port.name in links:
                source, output = links[port.name]
                given = parts[source][0].graph.outputs[output]
                if not _fits(given, port):
                    yield _misfit(parts[source][0].name, [given], file.name, [port])
            elif not number and _is_hidden(port) and made.get(port.name, (0, ""))[0]:
                later = parts[made[port.name][0]][0].name
                cause = f"genai_config.json lists {later} after {file.name}, which takes the {port.name!r} it returns"
                observed = f"{file.name} takes {_described([port])}, which {later} returns"
                yield PartProblem(file.name, "stages in the order in which they run", observed, cause)
            elif number and _is_hidden(port) and role_by_name(port, INPUTS) in TAKEN:
                returned = ", ".join(name for before, _ in parts[:number] for name in before.graph.outputs)[:200]
                observed = f"{file.name} takes {_described([port])}, and the stages before it return {returned}"
                cause = f"no stage before {file.name} returns {port.name!r}"
                yield PartProblem(file.name, "hidden states handed on by their name", observed, cause)
