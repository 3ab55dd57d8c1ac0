"""genai_config.json of onnxruntime-genai against the graph.

What the runtime does with each entry was tried with version 0.18 on tiny models. Another vocabulary or head size, a
name or template of no port where the graph has such a port under another name, and a shared buffer for a graph that
joins past and new entries each end in an error at the first step. Layers and kv heads it finds in the graph; older
versions allocate by the config.
"""

import re
from collections.abc import Iterator
from typing import Any

from kvdoctor.case import Case
from kvdoctor.checks.side_cars import numbers
from kvdoctor.checks.side_cars.claims import Claim
from kvdoctor.checks.side_cars.disagreement import Disagreement, either, on_disk, part_of, quoted, strings
from kvdoctor.checks.side_cars.numbers import ATTENTION
from kvdoctor.checks.side_cars.shown import windows
from kvdoctor.configs import GENAI_ROLES, GENAI_SLOTS, is_count
from kvdoctor.contract import CacheContract, Slot


def genai_config(case: Case) -> list[Disagreement]:
    """What it promises of the decoder and the graph does not show."""
    genai = case.folder.side_cars.genai
    model = part_of(genai, "model")
    decoder = part_of(model, "decoder")
    file = decoder.get("filename")
    if case.stack is None or case.contract is None or not isinstance(file, str):
        return []
    if file != case.stack.main.name:
        lost = Disagreement("model.decoder.filename", quoted(file), "no such file", quoted(case.decode_file))
        return [] if on_disk(case, file) else [lost]
    return [
        *_files(case, model),
        *_inputs(case, case.contract, strings(decoder.get("inputs")), "embedding" in model),
        *_logits(case, case.contract, strings(decoder.get("outputs"))),
        *_templates(case, case.contract, strings(decoder.get("inputs")), strings(decoder.get("outputs"))),
        *_encoder(case, case.contract, part_of(model, "encoder")),
        *_numbers(case, model, decoder),
        *_window(case, part_of(decoder, "sliding_window")),
        *_shared_buffer(case.contract, part_of(genai, "search")),
    ]


def _files(case: Case, model: dict[str, Any]) -> Iterator[Disagreement]:
    """The graphs beside the decoder."""
    for part in ("encoder", "embedding", "vision", "speech"):
        file = part_of(model, part).get("filename")
        if isinstance(file, str) and file.endswith(".onnx") and not on_disk(case, file):
            yield Disagreement(f"model.{part}.filename", quoted(file), "no such file", "the file of that part")


def _numbers(case: Case, model: dict[str, Any], decoder: dict[str, Any]) -> Iterator[Disagreement]:
    def claimed(part: dict[str, Any], path: str, key: str, what: Any) -> Iterator[Claim]:
        if is_count(part.get(key)):
            yield Claim(what, f"{path}.{key}", int(part[key]))

    for claim in claimed(decoder, "model.decoder", "num_hidden_layers", "layers"):
        yield from numbers.layers(case, claim, str(model.get("type")))
    for claim in claimed(decoder, "model.decoder", "num_key_value_heads", "kv_heads"):
        yield from numbers.sizes(case, claim)
    for claim in claimed(decoder, "model.decoder", "head_size", "head_dim"):
        yield from numbers.sizes(case, claim, fused=True)
    for claim in claimed(model, "model", "vocab_size", "vocabulary"):
        yield from numbers.vocabulary(case, claim, exactly=True)
    for claim in claimed(model, "model", "context_length", "context"):
        yield from numbers.context(case, claim)


def _inputs(case: Case, contract: CacheContract, names: dict[str, str], embedded: bool) -> Iterator[Disagreement]:
    """Names of inputs. One that the graph does not have under any name may be named in vain: it is not fed."""
    ports = contract.graph("decode").inputs
    for key, name in names.items():
        if name in case.main.inputs or "%d" in name:
            continue
        role = GENAI_ROLES[key][0] if key in GENAI_ROLES else None
        actual = [port.name for port in ports if port.role == role]
        if key in case.main.inputs:
            actual.append(key)
        if key == "input_ids" and "inputs_embeds" not in names and not embedded:
            actual += [port.name for port in ports if port.role == "embeddings"]
        unnamed = [port for port in actual if port not in names.values()]
        yield from _misnamed(f"model.decoder.inputs.{key}", name, "input", unnamed)


def _logits(case: Case, contract: CacheContract, names: dict[str, str]) -> Iterator[Disagreement]:
    name, port = names.get("logits"), contract.graph("decode").port("logits")
    if name is not None and name not in case.main.outputs and port is not None:
        yield from _misnamed("model.decoder.outputs.logits", name, "output", [port.name])


def _templates(
    case: Case, contract: CacheContract, given: dict[str, str], made: dict[str, str]
) -> Iterator[Disagreement]:
    """Templates of pasts and presents, which the layer's number completes."""
    for past_key, present_key, kind, part, _ in GENAI_SLOTS:
        whole = part or ("key-value" if kind in ATTENTION else None)
        slots = [s for s in contract.of_kind(kind) if s.layer is not None and s.part == (whole or s.part)]
        past, present = given.get(past_key), made.get(present_key)
        if past is not None and slots and not any(_completed(past, slot) == slot.past for slot in slots):
            actual = [_template(slots[0].past, slots[0])]
            yield from _misnamed(f"model.decoder.inputs.{past_key}", past, "input", actual)
        for slot in slots:
            if present is not None and slot.present and _completed(present, slot) not in case.main.outputs:
                actual = [_template(slot.present, slot)]
                yield from _misnamed(f"model.decoder.outputs.{present_key}", present, "output", actual)
                break


def _encoder(case: Case, contract: CacheContract, encoder: dict[str, Any]) -> Iterator[Disagreement]:
    """The same for the encoder, whose ports have no known roles: a name of no port, where a port is left unnamed."""
    file = case.stack.files.get("encoder") if case.stack else None
    if file is None or file.view is None or encoder.get("filename") != file.name:
        return
    layers = [slot for slot in contract.of_kind("cross-attention") if slot.layer is not None]
    for side, ports in (("input", file.view.inputs), ("output", file.view.outputs)):
        names = strings(encoder.get(f"{side}s"))
        meant = {
            key: {_completed(name, slot) for slot in layers} if "%d" in name else {name} for key, name in names.items()
        }
        left = [port for port in ports if not any(port in one for one in meant.values())]
        for key, name in names.items():
            if not meant[key] & set(ports):
                actual = [_template(port, layers[0]) if "%d" in name else port for port in left if meant[key]]
                yield from _misnamed(f"model.encoder.{side}s.{key}", name, side, actual)


def _misnamed(key: str, name: str, side: str, actual: list[str]) -> Iterator[Disagreement]:
    for port in actual[:1]:
        yield Disagreement(
            key,
            quoted(name),
            f"{side} {quoted(port)}",
            quoted(port),
            "what is bound under a name of no port is not found",
        )


def _window(case: Case, window: dict[str, Any]) -> Iterator[Disagreement]:
    """The window of the attention. One that slides over the prompt in chunks is another thing."""
    size, layers = window.get("window_size"), window.get("layers")
    seen = windows(case) or {}
    if not is_count(size) or window.get("slide_key_value_cache") is not False:
        return
    listed = [layer for layer in layers if is_count(layer) or layer == 0] if isinstance(layers, list) else []
    meant = {layer: width for layer, width in seen.items() if layer in listed} if listed else seen
    wrong = {width for width in meant.values() if width != size}
    # Without a list, the window is that of some layers.
    if wrong and (listed or size not in meant.values()):
        right = either(wrong) if min(wrong) > 0 else "no window"
        observed = f"local_window_size {either(wrong)} of GroupQueryAttention"
        yield Disagreement("model.decoder.sliding_window.window_size", str(size), observed, right)


def _shared_buffer(contract: CacheContract, search: dict[str, Any]) -> Iterator[Disagreement]:
    """One buffer for past and present, where the graph is seen to return the past with the new entries behind it."""
    slots = contract.of_kind("self-attention")
    joined = all(s.growth == "grow" and s.present is not None and s.continues_as == s.present for s in slots)
    if search.get("past_present_share_buffer") is True and search.get("num_beams", 1) == 1 and slots and joined:
        observed = "each present is the past and the new entries behind it"
        so = "the whole buffer is taken for past tokens"
        yield Disagreement("search.past_present_share_buffer", "true", observed, "false", so)


def _completed(template: str, slot: Slot) -> str:
    return template.replace("%d", str(slot.layer), 1)


def _template(name: str, slot: Slot) -> str:
    return re.sub(rf"(?<![0-9]){slot.layer}(?![0-9])", "%d", name, count=1)
