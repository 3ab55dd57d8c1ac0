"""Finds the encoders of images and audio whose rows take the places of tokens, in files of its folder: by interface.

Such an encoder takes no tokens, and returns rows as wide as the embeddings of the decoder, and of their element type.
genai_config.json or a name decides where several fit. Where a file that is named so does not fit, that is a problem.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.completeness import MOST_FED
from kvdoctor.analysis.configs import SideCars, is_count, read_part, read_strings
from kvdoctor.analysis.port_roles import FLOATS, INTEGERS, plain_port
from kvdoctor.analysis.stacks import FileRole, OnnxFile, PartProblem, StackFiles
from kvdoctor.contract import Axis, Features, Graph, PhaseName, Port, describe
from kvdoctor.model.operators import operators_with
from kvdoctor.model.view import PASSES_ON, Declared, integers

ROLES: dict[PhaseName, FileRole] = {"vision": "vision-encoder", "audio": "audio-encoder"}
GENAI_PARTS: dict[PhaseName, str] = {"vision": "vision", "audio": "speech"}
NAMES = {
    "vision": re.compile(r"vision_(encoder|model|tower).*|vision|image_encoder.*", re.ASCII),
    "audio": re.compile(r"audio_(encoder|model|tower).*|speech(_encoder.*)?|audio", re.ASCII),
}
SEEN = re.compile(r"pixel.*|images?(_.*)?|patches|.*patches", re.ASCII)
HEARD = re.compile(r"(input|audio)_(features|values).*|audio.*|mel.*|waveform|speech.*", re.ASCII)
GRID = re.compile(r"(image_)?grid_thw", re.ASCII)
MASK = re.compile(r".*mask.*", re.ASCII)
TOKEN_KEYS = {
    "vision": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index", "speech_token_id"),
}
ROW_KEYS = {
    "vision": ("image_seq_len", "image_seq_length", "mm_tokens_per_image", "vision_soft_tokens_per_image"),
    "audio": ("audio_seq_len", "audio_seq_length"),
}
TIME = re.compile(r"frame|time|length|seq|sample|step", re.ASCII)
"""Part of the name of an axis that counts frames or samples of audio."""
OUTPUT = re.compile(r"(image|audio|vision|speech)_(features|embeds|embeddings)|pooled_embeds", re.ASCII)
COMPARISONS = operators_with("compare", "clamp", "select")
IMAGE_SIZE, CHANNELS, MEL_BINS = 224, 3, 80
ROW_RANK = 2
"""Of float[rows, hidden]; axes in front of these count images and parts of them."""
IMAGE_RANK = 3
"""Of one image, float[channels, height, width]."""
MOST_PIXELS = 4096
"""Of a side of an image that is made."""
PATCHES = 4
"""Patches along each side of an image whose patches are fed as rows: a multiple of what a merger takes together."""


def add_feature_encoders(
    files: tuple[OnnxFile, ...], stacks: tuple[StackFiles, ...], configs: SideCars, widths: Mapping[str, Port]
) -> tuple[tuple[OnnxFile, ...], tuple[StackFiles, ...]]:
    """The files and stacks of a folder, with the encoders of images and audio as parts of the stacks.

    `widths` has, for each stack that takes embeddings of a known width, the input that takes those of tokens.
    """
    used = {file.name for stack in stacks for file in stack.members}
    free = [f for f in files if f.name not in used and f.view is not None and f.role in ("other", "encoder")]
    found = tuple(_add_to_stack(s, free, configs, widths[s.name]) if s.name in widths else s for s in stacks)
    roles = {file.name: role for s in found for role, file in s.files.items() if role in ROLES.values()}
    return tuple(replace(f, role=roles[f.name]) if f.name in roles else f for f in files), found


def _add_to_stack(stack: StackFiles, free: Sequence[OnnxFile], configs: SideCars, wanted: Port) -> StackFiles:
    files, problems, remarks = dict(stack.files), list(stack.problems), list(stack.remarks)
    for kind, role in ROLES.items():
        similar = [file for file in free if _kind_of(file, configs) == kind]
        # What takes the output of another file is a projector after an encoder.
        made = {name for file in free for name in file.graph.outputs}
        candidates = [file for file in similar if made.isdisjoint(file.graph.inputs)]
        fitting = [file for file in candidates if find_output(file, wanted) is not None]
        if fitting:
            chosen = min(fitting, key=lambda file: _preference(file, stack, kind, configs))
            files[role] = replace(chosen, role=role)
            problems += _compare_declared_rows(files[role], kind, configs, wanted)
            problems += _compare_placeholder(files.get("embedding"), kind, configs)
        elif named := [file for file in candidates if _is_named(file, kind, configs)]:
            best = min(named, key=lambda file: _preference(file, stack, kind, configs))
            problems += _misfit(best, stack, wanted, [file for file in free if file.name != best.name])
        elif strange := [file for file in free if _is_named(file, kind, configs) and file not in similar]:
            inputs = ", ".join(port.name for port in strange[0].graph.inputs.values() if not _is_feedable(port))
            remarks.append(f"{strange[0].name} was not run: no rule says what to feed {inputs or 'its inputs'}")
        elif not similar and configs.part(kind) and "embedding" in files and configs.first_count(TOKEN_KEYS[kind]):
            problems.append(_missing(stack, kind))
    names = " and ".join(file.name for role, file in files.items() if role in ROLES.values())
    if names and "embedding" not in files and not stack.problems:
        taken = f"{stack.main.name} takes {wanted.name} {describe(wanted.dtype, wanted.shape)}"
        observed = f"{names} makes rows of that width, and no graph makes embeddings of token ids"
        cause = f"there is no embedding graph next to {stack.main.name} and {names}"
        problems.append(PartProblem(stack.main.name, taken, observed, cause, essential=False, severity="warning"))
    return replace(stack, files=files, problems=tuple(problems), remarks=tuple(remarks))


def _kind_of(file: OnnxFile, configs: SideCars) -> PhaseName | None:
    """Whether a file encodes images or audio: by the names of its inputs, else by its own, else by their rank."""
    ports = list(file.graph.inputs.values())
    floats = [port for port in ports if port.dtype in FLOATS]
    if not floats or any(port.shape is None for port in ports) or not all(map(_is_feedable, ports)):
        return None
    for kind, pattern in (("vision", SEEN), ("audio", HEARD)):
        if pattern.fullmatch(floats[0].name):
            return kind  # type: ignore[return-value]
    for kind in ROLES:
        if _is_named(file, kind, configs):
            return kind
    rank = len(floats[0].shape or ())
    return "vision" if rank >= 4 else "audio" if len(floats) == 1 and rank in (2, 3) and len(ports) <= 2 else None


def _is_feedable(port: Declared) -> bool:
    """Whether it is known what an input of an encoder is fed: features, a mask of them, or the sizes of a grid."""
    if port.shape is None or math.prod(size for size in map(as_number, port.shape) if isinstance(size, int)) > MOST_FED:
        return False
    return port.dtype in FLOATS or bool(MASK.fullmatch(port.name) or GRID.fullmatch(port.name))


def _is_named(file: OnnxFile, kind: PhaseName, configs: SideCars) -> bool:
    return _named_file(kind, configs) == file.name or NAMES[kind].fullmatch(file.path.stem) is not None


def _named_file(kind: PhaseName, configs: SideCars) -> str | None:
    """The file that genai_config.json names for an encoder."""
    return read_strings(read_part(read_part(configs.genai, "model"), GENAI_PARTS[kind])).get("filename")


def find_output(file: OnnxFile, wanted: Port) -> Declared | None:
    """The output whose rows are as wide as embeddings and of their type; of several the one that is named so."""
    width = (wanted.shape or (None,))[-1]
    fitting = [
        port
        for port in file.graph.outputs.values()
        if port.dtype == wanted.dtype and len(port.shape or ()) >= ROW_RANK and _has_width(port, width)
    ]
    named = [port for port in fitting if OUTPUT.fullmatch(port.name)]
    return next(iter(named or fitting), None)


def _has_width(port: Declared, width: object) -> bool:
    """Whether the last axis has that number; a name fits where the name of the output says what it is."""
    size = as_number((port.shape or (None,))[-1])
    return size == width if isinstance(size, int) else OUTPUT.fullmatch(port.name) is not None


def _preference(file: OnnxFile, stack: StackFiles, kind: PhaseName, configs: SideCars) -> tuple[bool, bool, str]:
    named = _named_file(kind, configs)
    tail = stack.main.suffix
    return named is not None and file.name != named, not (file.path.stem.endswith(tail) if tail else True), file.name


def _misfit(file: OnnxFile, stack: StackFiles, wanted: Port, others: Sequence[OnnxFile]) -> Iterator[PartProblem]:
    """Why the file that is named as an encoder is not that of a decoder; one that another file takes up is none."""
    outputs = list(file.graph.outputs.values())
    for port in (port for other in others for port in other.graph.inputs.values()):
        ends = [(made, as_number((made.shape or (None,))[-1])) for made in outputs if port.like(made)]
        wide = [made for made, end in ends if isinstance(end, int) and end == as_number((port.shape or (None,))[-1])]
        if wide or port.name in file.graph.outputs:
            return  # a projector in a file of its own
    made = ", ".join(f"{port.name} {describe(port.dtype, port.shape)}" for port in outputs)
    declared = f"{stack.main.name} takes {wanted.name} {describe(wanted.dtype, wanted.shape)}"
    observed = f"{file.name} returns {made}"
    cause = f"{observed}, and {declared}: its rows cannot take the places of embeddings"
    width = (wanted.shape or (None,))[-1]
    cast = any(_has_width(port, width) and len(port.shape or ()) >= ROW_RANK for port in outputs)
    severity: Literal["warning", "error"] = "warning" if cast else "error"  # rows of another type can be converted
    yield PartProblem(file.name, declared, observed, cause, essential=False, severity=severity)


def _missing(stack: StackFiles, kind: PhaseName) -> PartProblem:
    what = "images" if kind == "vision" else "sound"
    declared = f"config.json has a {kind}_config and the id of its placeholder token"
    observed = f"no file returns rows for the embeddings of {stack.main.name}"
    cause = f"there is no encoder of {what} that fits {stack.main.name}: text alone can be decoded"
    return PartProblem(stack.main.name, declared, observed, cause, essential=False, severity="note")


def _compare_declared_rows(file: OnnxFile, kind: PhaseName, configs: SideCars, wanted: Port) -> Iterator[PartProblem]:
    """The number of rows that the graph declares, where it is a number, with that of placeholders."""
    expected, output = _expected_rows(kind, configs, file), find_output(file, wanted)
    rows = as_number((output.shape or (None, None))[-2]) if output is not None else None
    if isinstance(rows, int) and output is not None and len(output.shape or ()) == 2:
        rows, rest = divmod(rows, _images_at_once(file, kind))
        rows = -1 if rest else rows
    if expected is None or output is None or not isinstance(rows, int) or rows == expected[0]:
        return
    returned = f"{file.name} returns {output.name} {describe(output.dtype, output.shape)}, {rows} rows"
    declared = f"{expected[1]}: {expected[0]}"
    cause = f"{returned}, and a prompt has {expected[0]} placeholders ({expected[1]})"
    yield PartProblem(file.name, declared, returned, cause, essential=False)


def _compare_placeholder(embedding: OnnxFile | None, kind: PhaseName, configs: SideCars) -> Iterator[PartProblem]:
    """The id of the placeholder in the config with those whose places an embedding graph fills with rows."""
    token = configs.first_count(TOKEN_KEYS[kind])
    if token is None or embedding is None or not any(port.dtype in FLOATS for port in embedding.graph.inputs.values()):
        return
    compared = _compared_ids(embedding)
    if compared and token[0] not in compared:
        observed = f"{embedding.name} puts rows in the places of token {' or '.join(map(str, sorted(compared)))}"
        declared = f"{token[1]}: {token[0]}"
        cause = f"{observed}, and the placeholder is token {token[0]} ({token[1]})"
        yield PartProblem(embedding.name, declared, observed, cause, essential=False)


def _compared_ids(embedding: OnnxFile) -> set[int]:
    """The numbers that an embedding graph compares its token ids with; empty where it has bounds or other tests."""
    view, found = embedding.graph, set[int]()
    ids = {port.name for port in view.inputs.values() if port.dtype in INTEGERS}
    for node in view.model.graph.node:
        reads = [view.main.through(name, PASSES_ON) for name in node.input]
        if ids.isdisjoint(reads) or node.op_type not in COMPARISONS:
            continue
        constants = [tensor for name in node.input if (tensor := view.main.constant(name)) is not None]
        numbers = [integers(tensor) for tensor in constants]
        if node.op_type != "Equal" or len(numbers) != 1 or not numbers[0]:
            return set()
        found |= set(numbers[0])
    return found


def _images_at_once(file: OnnxFile, kind: PhaseName) -> int:
    """The number of images, or of audio clips, that an encoder takes at once, where it is fixed; else 1."""
    port = next(port for port in file.graph.inputs.values() if port.dtype in FLOATS)
    counted = len(port.shape or ()) - (IMAGE_RANK if kind == "vision" else len(port.shape or ()) - 1)
    sizes = [as_number(size) for size in (port.shape or ())[: max(counted, 0)]]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def read_feature_encoder(file: OnnxFile, kind: PhaseName, wanted: Port, configs: SideCars) -> tuple[Graph, Features]:
    """The ports of an encoder in the sizes that it is run with, and what its rows stand for.

    Sizes that neither the graph nor a config gives are those of one small image, or of one audio clip.
    """
    output = find_output(file, wanted)
    assert output is not None  # noqa: S101 - chosen for it
    inputs = tuple(_input(port, kind, configs) for port in file.graph.inputs.values())
    outputs = tuple(
        plain_port(port, "features" if port.name == output.name else "auxiliary")
        for port in file.graph.outputs.values()
    )
    token, expected = configs.first_count(TOKEN_KEYS[kind]), _expected_rows(kind, configs, file)
    features = Features(
        phase=kind,
        output=output.name,
        token=token[0] if token else None,
        rows=expected[0] if expected else None,
        declared=expected[1] if expected else "",
        pieces=_images_at_once(file, kind),
    )
    return Graph(file.name, inputs, outputs), features


def _input(port: Declared, kind: PhaseName, configs: SideCars) -> Port:
    rank, sizes = len(port.shape or ()), [as_number(size) for size in port.shape or ()]
    axes: list[Axis] = ["fixed"] * rank
    if GRID.fullmatch(port.name):
        return Port(port.name, port.dtype, (1, 3), "setting", ("fixed", "fixed"), value=PATCHES)
    side = _declared_sides(configs) or (IMAGE_SIZE, IMAGE_SIZE)
    if kind == "vision":
        usual: Sequence[int] = (*[1] * max(rank - 3, 0), CHANNELS, *side) if rank > 2 else (PATCHES * PATCHES, 1)
        if MASK.fullmatch(port.name):
            usual = (*[1] * max(rank - 2, 0), *side)
    else:
        part = configs.part(kind)
        bins = next((n for key in ("num_mel_bins", "input_feat_size", "n_mels") if is_count(n := part.get(key))), None)
        usual = (1, *[bins or MEL_BINS] * max(rank - 1, 0))
        open_axes = [at for at in range(1, rank) if not isinstance(sizes[at], int)]
        named = [at for at in open_axes if TIME.search(str(sizes[at]))]
        if open_axes:  # frames or samples: the axis that is named so, else the last one that is open
            axes[(named or open_axes)[-1]] = "encoder_input"
    usual = (*usual, *[1] * rank)[:rank]
    shape = [
        size if isinstance(size, int) or axis == "encoder_input" else known
        for size, known, axis in zip(sizes, usual, axes, strict=True)
    ]
    role: Any = "encoder_mask" if MASK.fullmatch(port.name) else "features"
    return Port(port.name, port.dtype, tuple(shape), role, tuple(axes))


def _declared_sides(configs: SideCars) -> tuple[int, int] | None:
    """Height and width of an image as a config has them."""
    size = configs.part("vision").get("image_size")
    if not size:
        size = configs.preprocessor.get("crop_size") or configs.preprocessor.get("size")
    if isinstance(size, dict):
        longest = size.get("longest_edge") or size.get("shortest_edge")
        size = [size.get("height", longest), size.get("width", longest)]
    both = size if isinstance(size, list) and len(size) == 2 else [size, size]
    height, width = (number if is_count(number) and number <= MOST_PIXELS else None for number in both)
    return None if height is None or width is None else (height, width)


def _expected_rows(kind: PhaseName, configs: SideCars, file: OnnxFile) -> tuple[int, str] | None:
    """The number of placeholders for one image, or one audio clip of full length, and what says so."""
    ports = file.graph.inputs.values()
    if kind == "audio":
        free = any(not isinstance(as_number(size), int) for port in ports for size in (port.shape or ())[1:])
        return None if free else configs.first_count(ROW_KEYS[kind])
    shapes = [port.shape or () for port in ports]
    sides = [as_number(size) for shape in shapes if len(shape) > IMAGE_RANK for size in shape[-2:]]
    if not all(isinstance(size, int) for size in sides) and _declared_sides(configs) is None:
        return None  # the rows of an image of unknown size say nothing
    vision = configs.part("vision")
    if any(GRID.fullmatch(port.name) for port in ports):
        merged = vision.get("spatial_merge_size")
        if not is_count(merged) or PATCHES % merged:
            return None
        rows = (PATCHES // merged) ** 2
        return rows, f"config.json, {PATCHES}x{PATCHES} patches merged by spatial_merge_size {merged}"
    if found := configs.first_count(ROW_KEYS[kind]):
        return found
    patch, scale, side = vision.get("patch_size"), configs.config.get("scale_factor"), vision.get("image_size")
    if is_count(patch) and is_count(scale) and is_count(side) and side % patch == 0:
        rows = math.ceil((side // patch) ** 2 / scale**2)
        return rows, "config.json, (image_size / patch_size)^2 / scale_factor^2"
    return None
