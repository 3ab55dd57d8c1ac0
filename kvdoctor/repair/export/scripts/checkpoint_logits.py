"""Computes a checkpoint's logits for given feeds with PyTorch and transformers. Run as a script, never imported.

The only argument is a JSON object: `checkpoint` (a folder, or a model of the hub) and `local`, whether nothing may be
downloaded. Each line of standard input is a JSON object: `feeds` and `out`, the paths of .npz files, and `prefix` of
the names in the first. Each answer is a JSON object: facts about what was computed, or `failed` with the reason.

Fed: `tokens` int64[batch, all], of which the first `total` are the sequence, `prompt` (tokens of the prefill), and what
the encoder takes: `encoder_input`, `encoder_mask`, or `encoder_states` in place of an encoder. Left in `out`: `whole`
float[batch, total, vocabulary], the whole sequence without a cache; `loop`, the same from the prefill and one token a
step; `longer`, the last logits of all tokens in one call, where there are more; `states` of the encoder.

With `modules`, a number of tokens, one call without a cache of so many tokens is made instead, on the graph's own
encoder states where `states` are fed. Left in `out`: `names`, the modules in the order in which they end, all names of
one joined by a space; `classes`; and `in.N` and `out.N`, the first tensor that module N was given and gave. Modules
that are called more than once are left out. The answer names the `embedding` and the `head`.

Code of a checkpoint is never run, and its weights are never unpickled.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers

LAST = 16
"""Tokens of a longer call whose logits are left, the last ones."""
MOST_BYTES = 64 << 20
"""Bytes of a tensor of a module, beyond which it is not left."""

HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel", "EncoderDecoderModel", "ForPreTraining")
"""Endings of the names of classes that return logits over tokens."""
ENCODED = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForVision2Seq",
    "AutoModelForImageTextToText",
)


class CannotRun(Exception):
    """A checkpoint cannot be run; the message says why."""


def model_class(config: Any, has_encoder: bool) -> Any:
    """The class of a checkpoint: the one it names, if that returns logits and has an encoder where one is needed."""
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, str(name), None)
        fits = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        if fits and str(name).endswith(HEADS) and bool(getattr(config, "is_encoder_decoder", False)) == has_encoder:
            return named
    for name in ENCODED if has_encoder else ("AutoModelForCausalLM",):
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    kind = "an encoder-decoder" if has_encoder else "a decoder"
    raise CannotRun(f"transformers {transformers.__version__} has no class that runs {config.model_type!r} as {kind}")


def load(checkpoint: str, local: bool, has_encoder: bool) -> Any:
    """The model of a checkpoint in float32.

    Raises:
        CannotRun: it lacks weights, which would be made up, or transformers refuses it.
    """
    given: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(checkpoint, **given)
    model, info = model_class(config, has_encoder).from_pretrained(
        checkpoint, config=config, weights_only=True, output_loading_info=True, **given
    )
    lacking = sorted(info["missing_keys"])
    if lacking or info["mismatched_keys"]:
        named = ", ".join(map(str, (lacking or list(info["mismatched_keys"]))[:3]))
        raise CannotRun(f"its weights do not fill {type(model).__name__}: {named} missing or of another shape")
    return model.float().eval()


def run(model: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """The logits of the whole sequence and of the loop, as arrays."""
    longer, prompt = torch.from_numpy(feeds["tokens"]), int(feeds["prompt"])
    tokens = longer[:, : int(feeds["total"])]
    encoder, name = encoder_feeds(model, feeds), "decoder_input_ids" if "encoder" in feeds else "input_ids"
    out = model(**{name: tokens}, **encoder, use_cache=False)
    found = {"whole": out.logits}
    states = getattr(out, "encoder_last_hidden_state", None)
    if states is not None:
        found["states"] = states
        mask = {"attention_mask": encoder["attention_mask"]} if "attention_mask" in encoder else {}
        encoder = {"encoder_outputs": transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states), **mask}
    logits, past = [], None
    for start, stop in spans(prompt, tokens.shape[1]):
        out = model(**{name: tokens[:, start:stop]}, **encoder, past_key_values=past, use_cache=True)
        past = getattr(out, "past_key_values", None)
        if past is None:
            break  # a state under another name: the whole sequence has to do
        logits.append(out.logits)
    else:
        found["loop"] = torch.cat(logits, dim=1)
    if longer.shape[1] > tokens.shape[1]:
        found["longer"] = model(**{name: longer}, **encoder, use_cache=False).logits[:, -LAST:]
    return {name: array.float().numpy() for name, array in found.items()}


def run_modules(model: Any, feeds: dict[str, Any], count: int) -> dict[str, Any]:
    """What each module was given and gave in one call without a cache, as arrays."""
    if "states" in feeds:  # a difference of the encoders is not to be seen in the decoder
        feeds = {name: array for name, array in feeds.items() if name != "encoder_input"}
        feeds["encoder_states"] = feeds["states"]
    aliases: dict[Any, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(name)
    ended: list[Any] = []
    seen: dict[Any, tuple[Any, Any]] = {}

    def note(module: Any, given: Any, named: Any, out: Any) -> None:
        ended.append(module)
        seen[module] = first_tensor([*given, *named.values()]), first_tensor(out)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in aliases]
    name = "decoder_input_ids" if "encoder" in feeds else "input_ids"
    try:
        model(**{name: torch.from_numpy(feeds["tokens"])[:, :count]}, **encoder_feeds(model, feeds), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    once = [module for module in ended if ended.count(module) == 1]
    found: dict[str, Any] = {
        "names": np.array([" ".join(name or "." for name in aliases[module]) for module in once], dtype=np.str_),
        "classes": np.array([type(module).__name__ for module in once], dtype=np.str_),
    }
    for index, module in enumerate(once):
        for side, tensor in zip(("in", "out"), seen[module], strict=True):
            if tensor is not None and tensor.numel() * 4 <= MOST_BYTES:
                found[f"{side}.{index}"] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return found


def first_tensor(values: Any) -> Any:
    """The first tensor in nested values, None where there is none."""
    if isinstance(values, torch.Tensor):
        return values.detach().clone()
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return next((one for one in map(first_tensor, values) if one is not None), None)
    return None


def name_of(model: Any, wanted: Any) -> str:
    """The name of a module of a model; empty where it is none."""
    return next((name for name, module in model.named_modules() if module is wanted), "") if wanted is not None else ""


def spans(prompt: int, total: int) -> Iterator[tuple[int, int]]:
    """Where the steps of the loop begin and end."""
    yield 0, prompt
    for start in range(prompt, total):
        yield start, start + 1


def encoder_feeds(model: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """The inputs of the encoder, by the names of the model's `forward`."""
    found: dict[str, Any] = {}
    if "encoder_input" in feeds:
        given = torch.from_numpy(feeds["encoder_input"])
        found[model.main_input_name] = given.float() if given.is_floating_point() else given.long()
    elif "encoder_states" in feeds:
        states = torch.from_numpy(feeds["encoder_states"]).float()
        found["encoder_outputs"] = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states)
    if "encoder_mask" in feeds:
        found["attention_mask"] = torch.from_numpy(feeds["encoder_mask"]).long()
    return found


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where they like

    def tell(**facts: Any) -> None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()

    asked = json.loads(sys.argv[1])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    tell(**versions)
    models: dict[bool, Any] = {}
    for question in lines():
        try:
            with np.load(question["feeds"]) as file:  # allow_pickle is off
                names = {name: name.removeprefix(question["prefix"]) for name in file.files}
                feeds = {short: file[name] for name, short in names.items() if name.startswith(question["prefix"])}
            has_encoder = "encoder" in feeds
            if has_encoder not in models:
                models[has_encoder] = load(asked["checkpoint"], asked["local"], has_encoder)
            model = models[has_encoder]
            with torch.inference_mode():
                count = question.get("modules")
                found = run(model, feeds) if count is None else run_modules(model, feeds, count)
            np.savez(question["out"], **found)
            ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
            tell(model=type(model).__name__, **versions, **{end: name_of(model, one) for end, one in ends.items()})
        except Exception as error:  # whatever a checkpoint makes these libraries raise is the answer
            tell(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def lines() -> Iterator[dict[str, Any]]:
    """The requests. When standard input ends, with the parent, this process ends in the middle of one."""
    waiting: list[str] = []
    ready = threading.Condition()

    def read() -> None:
        for line in sys.stdin:
            with ready:
                waiting.append(line)
                ready.notify()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        with ready:
            ready.wait_for(lambda: bool(waiting))
            line = waiting.pop(0)
        yield json.loads(line)


if __name__ == "__main__":
    main()
