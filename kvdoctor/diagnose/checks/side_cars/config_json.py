"""The three files of transformers and Optimum against the graph: config.json, generation_config.json, export.json.

generation_config.json may name token ids that the graph does not have, and more tokens than it has positions; sources
of the keys: transformers 4.57 and 5.23, `generation/configuration_utils.py`, and that of Whisper. export.json, of the
exporters of transformers 5, lists files, and the inputs as they were traced; source: transformers 5.23,
`exporters/metadata.py` and `exporters/base.py`: the runner drops what was not traced, and asks for every input.
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor.analysis.configs import decoder_config, is_count, read_part
from kvdoctor.contract import describe
from kvdoctor.diagnose.checks.side_cars import numbers
from kvdoctor.diagnose.checks.side_cars.compare_values import compare_values
from kvdoctor.diagnose.checks.side_cars.disagreement import (
    Disagreement,
    Disagreements,
    describe_tensor,
    fits_port,
    missing_file,
    plain,
    quoted,
)
from kvdoctor.diagnose.checks.side_cars.graph_sizes import logits_width, token_rows
from kvdoctor.diagnose.checks.side_cars.numbers import ConfigClaim, claims
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.files import STEM
from kvdoctor.model.view import Declared
from kvdoctor.report.wording import shorten_names

ENDS = ("eos_token_id",)
FORCED = ("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "no_timestamps_token_id")
NAMED = ("lang_to_id", "task_to_id")
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
FED = ("decoder_start_token_id", "bos_token_id")
"""Keys by what becomes of their ids: they end a sequence, are chosen, are forbidden, or are fed first."""
MOST_IDS = 10_000
"""Ids of one key that are looked at; the file may hold anything."""
MOST_LEAVES = 500


def config_json(context: ContractContext) -> list[Disagreement]:
    """The entries of config.json that disagree with the graph of a decoder."""
    config = context.folder.side_cars.config
    if not config or not meant_for(context):
        return []
    model_type = str(decoder_config(config).get("model_type"))
    sizes = [found for claim in claims(config) for found in _compare_claim(context, claim, model_type)]
    return [*sizes, *compare_values(context)]


def meant_for(context: ContractContext) -> bool:
    """Whether config.json can describe a stack: it generates tokens, and every other decoder of its folder was read."""
    if not context.contract.slots:
        return False
    decode, main = context.contract.graph("decode"), context.stack.main
    if not context.contract.takes_tokens or not (decode.port("logits") or decode.port("next_token")):
        return False
    read = {file.path for file in context.folder.files}
    return has_usual_name(context) or read >= set(main.path.parent.glob("*.onnx"))


def has_usual_name(context: ContractContext) -> bool:
    """Whether the decoder has the file name of Optimum, so that config.json describes it."""
    return STEM.fullmatch(context.stack.main.path.stem) is not None


def _compare_claim(context: ContractContext, claim: ConfigClaim, model_type: str) -> list[Disagreement]:
    if claim.what == "layers":
        return list(numbers.layers(context, claim, model_type))
    if claim.what == "vocabulary":
        return list(numbers.vocabulary(context, claim))
    if claim.what == "context":
        fixed = context.contract.capacity is not None  # a shorter context on purpose
        return [] if fixed else list(numbers.context(context, claim))
    packed = any("int" in slot.dtype for slot in context.contract.of_kind("self-attention"))
    return list(numbers.sizes(context, claim, fused=claim.what == "head_dim" and not packed))


def generation_config(context: ContractContext) -> list[Disagreement]:
    """The entries of generation_config.json that the graph of a decoder cannot follow."""
    config = context.folder.side_cars.generation
    if not config or not meant_for(context):
        return []
    found = list(_compare_chosen(context, config))
    rows, key = token_rows(context), FED[0] if context.contract.has_encoder_states else FED[1]
    if rows is not None:  # the other ids of an encoder-decoder may be those of its encoder
        so = "the first call looks up a row that the table does not have"
        found += _outside(key, config.get(key), rows, f"an embedding table of {rows} rows", so)
    length = config.get("max_length")
    if is_count(length) and context.contract.capacity is None:  # a buffer of fixed size has fewer on purpose
        found += numbers.context(context, ConfigClaim("context", "max_length", length))
    return found


def _compare_chosen(context: ContractContext, config: dict[str, Any]) -> Disagreements:
    """Ids that are looked for among the logits, or written into them."""
    width = logits_width(context)
    if width is None:
        return
    for keys, so in (
        (ENDS, "the model never returns the id, so generation does not end by it"),
        ((*FORCED, *NAMED), "the logits have no entry for the id that is forced"),
        (SUPPRESSED, "the logits have no entry for the id that is suppressed"),
    ):
        for key in keys:
            yield from _outside(key, config.get(key), width, f"logits of width {width}", so)


def _outside(key: str, value: Any, count: int, observed: str, so: str) -> Disagreements:
    """An entry with ids from `count` on. Ids below 0 stand for none."""
    outside = sorted({one for one in _list_ids(value) if one >= count})
    if outside:
        shown = shorten_names([*map(str, outside)])
        yield Disagreement(plain(key), shown, observed, f"an id below {count}", so)


def _list_ids(value: Any) -> Iterator[int]:
    """The whole numbers of an entry: one, a list, the values of names, or pairs of a position and an id."""
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for one in values[:MOST_IDS]:
        last = one[-1] if isinstance(one, list) and one else one
        if isinstance(last, int) and not isinstance(last, bool):
            yield last


def export_json(context: ContractContext) -> list[Disagreement]:
    """Files that are not there, and traced inputs that are not those of the graph."""
    components = read_part(context.folder.side_cars.export, "components")
    views = {file.name: file.view for file in context.stack.files.values() if file.view is not None}
    found: list[Disagreement] = []
    for name in components:
        entry, key = read_part(components, name), f"components.{plain(name)}"
        file = entry.get("file")
        if not isinstance(file, str):
            continue
        if file in views:
            kwargs = read_part(read_part(entry, "metadata"), "kwargs")
            found += _traced(f"{key}.metadata.kwargs", kwargs, views[file].inputs) if kwargs else ()
        else:
            found += missing_file(context, f"{key}.file", file, "component")
    return found


def _traced(key: str, kwargs: dict[str, Any], inputs: dict[str, Declared]) -> Disagreements:
    """A cache was traced as a whole, and what the graph does not read is no input of it."""
    ports = {name.removeprefix("input."): port for name, port in inputs.items()}
    for path, port in ports.items():
        if path.partition(".")[0] not in kwargs:
            missing = f"no {quoted(path.partition('.')[0])}"
            yield Disagreement(key, missing, f"input {quoted(port.name)}", quoted(path), "the runner cannot feed it")
    for path, spec in _tensors(kwargs):
        if path in ports and not fits_port(spec, ports[path]):
            there = describe(ports[path].dtype, ports[path].shape)
            yield Disagreement(f"{key}.{plain(path)}", describe_tensor(spec), there, there)


def _tensors(kwargs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors among the traced inputs by path."""
    waiting = list(kwargs.items())
    for path, spec in waiting:
        if not isinstance(spec, dict) or len(waiting) > MOST_LEAVES:
            continue
        leaves = spec.get("leaves")
        if isinstance(leaves, dict):
            waiting += [(f"{path}.{name}", leaf) for name, leaf in leaves.items()]
        else:
            yield path, spec
