"""Files that are damaged, and files beside them that say something else."""

import json
from pathlib import Path

import onnx
from onnx import helper

from evidence.faults.base_models import ALL, LONE, SPLIT, TF5, Export
from evidence.faults.registry import fault
from evidence.faults.surgery import FLOAT

FEW = ("gpt2", "llama-gqa", "marian", "t5-pair", "whisper")


@fault("unreadable", "the download stopped half way", FEW)
def cut_short(export: Export) -> None:
    export.after.append(lambda folder: _write(folder / export.decoder, lambda data: data[: len(data) // 2]))


@fault("unreadable", "a pointer of Git LFS lies in the place of the file", FEW)
def pointer(export: Export) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1000\n"
    export.after.append(lambda folder: _write(folder / export.decoder, lambda _: text))


@fault("unreadable", "the file is empty", FEW)
def empty_file(export: Export) -> None:
    export.after.append(lambda folder: _write(folder / export.decoder, lambda _: b""))


def _write(path: Path, change: "object") -> None:
    path.write_bytes(change(path.read_bytes()))


def _outside(folder: Path, name: str) -> Path:
    """Save a model with its weights beside it."""
    onnx.save_model(
        onnx.load(folder / name), folder / name, save_as_external_data=True, location="weights.bin", size_threshold=64
    )
    return folder / "weights.bin"


@fault("external-data-missing", "the file of the weights was not copied", FEW)
def weights_missing(export: Export) -> None:
    export.after.append(lambda folder: _outside(folder, export.decoder).unlink())


@fault("external-data-missing", "the file of the weights is cut short", FEW)
def weights_cut_short(export: Export) -> None:
    export.after.append(lambda folder: _write(_outside(folder, export.decoder), lambda data: data[:1000]))


@fault("external-data-escapes", "the weights lie beside the folder", FEW)
def weights_elsewhere(export: Export) -> None:
    def move(folder: Path) -> None:
        weights = _outside(folder, export.decoder)
        weights.rename(folder.parent / "weights.bin")
        model = onnx.load(folder / export.decoder, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../weights.bin"
        (folder / export.decoder).write_bytes(model.SerializeToString())

    export.after.append(move)


@fault("session-refused", "an operator that nobody has", ALL)
def unknown_operator(export: Export) -> None:
    body = export.later
    body.model.opset_import.append(helper.make_opsetid("com.example", 1))
    body.replace("logits", lambda old: body.op("Sparkle", old, domain="com.example"))


@fault("session-refused", "an addition of two types", (*LONE, *SPLIT, *TF5))
def types_mixed(export: Export) -> None:
    body = export.later
    body.replace("logits", lambda old: body.op("Add", old, body.past_length()))


@fault("worker-died", "an index that divides the smallest number by -1", (*LONE, *SPLIT))
def division_overflows(export: Export) -> None:
    import numpy as np

    body = export.later
    by = body.op("Max", body.op("Sub", np.array([3]), body.past_length()), np.array([-1]))
    by = body.op("Add", by, body.op("Cast", body.op("Equal", by, np.array([0])), to=7))
    low = body.op("Div", np.array([-(2**63)]), by)
    nothing = body.op(
        "Cast", body.op("Min", body.op("Abs", body.op("Mod", low, np.array([1]))), np.array([0])), to=FLOAT
    )
    body.replace("logits", lambda old: body.op("Add", old, nothing))


def _config(export: Export, change: "object") -> None:
    config = json.loads(export.beside["config.json"])
    change(config)
    export.beside["config.json"] = json.dumps(config).encode()


def _with_key(config: dict, *keys: str) -> str:
    return next(key for key in keys if key in config)


CONFIGURED = (*LONE, *SPLIT)


@fault("config-disagrees", "the config has one layer more", CONFIGURED, severity="warning")
def config_of_more_layers(export: Export) -> None:
    def more(config: dict) -> None:
        config[_with_key(config, "num_decoder_layers", "decoder_layers", "n_layer", "num_hidden_layers")] = 3

    _config(export, more)


@fault("config-disagrees", "the config has another vocabulary", (*CONFIGURED, *TF5), severity="warning")
def config_of_another_vocabulary(export: Export) -> None:
    _config(
        export, lambda config: config.update(dict.fromkeys({"vocab_size", "decoder_vocab_size"} & set(config), 100))
    )


@fault(
    "config-disagrees",
    "the config has twice the heads",
    ("llama-gqa", "qwen2", "gpt2", "marian", "whisper", "t5"),
    severity="warning",
)
def config_of_more_heads(export: Export) -> None:
    def more(config: dict) -> None:
        key = _with_key(config, "num_key_value_heads", "decoder_attention_heads", "n_head", "num_heads")
        config[key] *= 2

    _config(export, more)
