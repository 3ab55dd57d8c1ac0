"""The healthy exports that are made sick, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from evidence.faults.anatomy import Body
from evidence.faults.surgery import put_in_order

MERGED_FILE, FIRST_FILE, LATER_FILE = "decoder_model_merged.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
PAIRS = ((FIRST_FILE, LATER_FILE), ("prefill.onnx", "decode.onnx"))


@dataclass
class Export:
    """An export in memory: its models by file, its bodies, and what lies beside them."""

    models: dict[str, onnx.ModelProto]
    beside: dict[str, bytes]
    first: Body
    later: Body
    after: list[Callable[[Path], None]] = field(default_factory=list)

    @property
    def bodies(self) -> tuple[Body, ...]:
        return (self.later,) if self.first is self.later else (self.first, self.later)

    @property
    def decoder(self) -> str:
        """The file that decodes with the cache."""
        return next(name for name, model in self.models.items() if model is self.later.model)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for body in self.bodies:
            put_in_order(body.graph)
        for name, model in self.models.items():
            (folder / name).write_bytes(model.SerializeToString())
        for name, data in self.beside.items():
            (folder / name).write_bytes(data)
        for change in self.after:
            change(folder)
        return folder


@dataclass(frozen=True)
class Patient:
    """A healthy export. The committed ones lie in fixtures/exports, the others are made by an exporter of the zoo."""

    name: str
    exporter: str
    architecture: str
    files: tuple[str, ...]

    def read(self, folder: Path) -> Export:
        models = {name: onnx.load(folder / name) for name in self.files}
        beside = {path.name: path.read_bytes() for path in folder.glob("*.json") if path.name != "provenance.json"}
        names = set(models)
        for first, later in PAIRS:
            if {first, later} <= names:
                bodies = (
                    Body(models[first], models[first].graph, "first"),
                    Body(models[later], models[later].graph, "later"),
                )
                return Export(models, beside, *bodies)
        if MERGED_FILE in names:
            return Export(models, beside, *_branches(models[MERGED_FILE]))
        body = Body(models["model.onnx"], models["model.onnx"].graph, "all")
        return Export(models, beside, body, body)


def _branches(model: onnx.ModelProto) -> tuple[Body, Body]:
    """The two branches of a merged decoder, whose emptied outputs are repaired."""
    node = next(node for node in model.graph.node if node.op_type == "If")
    first, later = (next(a.g for a in node.attribute if a.name == name) for name in ("else_branch", "then_branch"))
    body = Body(model, later, "later")
    for past, now in body.cross_slots():
        maker = body.producer(now)
        assert maker is not None
        maker.CopyFrom(onnx.helper.make_node("Identity", [past], [now], name=maker.name))
    return Body(model, first, "first"), body


def _committed() -> list[Patient]:
    found = [Patient(name, "committed", name, ("model.onnx",)) for name in ("gpt2", "llama-gqa")]
    for name in ("marian-4.57.6", "t5", "whisper"):
        short = name.partition("-")[0]
        found.append(Patient(short, "committed", name, (MERGED_FILE, "encoder_model.onnx")))
        found.append(Patient(f"{short}-pair", "committed", name, (FIRST_FILE, LATER_FILE, "encoder_model.onnx")))
    return found


def _made() -> list[Patient]:
    two = ("prefill.onnx", "decode.onnx")
    return [
        *(Patient(name, "optimum", name, ("model.onnx",)) for name in ("opt", "bloom", "qwen2")),
        *(Patient(f"{name}-tf5", "transformers", name, two) for name in ("llama", "t5")),
        *(Patient(f"{name}-genai", "genai", name, ("model.onnx",)) for name in ("llama", "mistral", "qwen2")),
    ]


BASES = {base.name: base for base in (*_committed(), *_made())}
FLAT, MERGED = ("gpt2", "llama-gqa"), ("marian", "t5", "whisper")
PAIRED = tuple(f"{name}-pair" for name in MERGED)
SPLIT = (*MERGED, *PAIRED)
COMMITTED = (*FLAT, *SPLIT)
OPTIMUM, TF5, GENAI = ("opt", "bloom", "qwen2"), ("llama-tf5", "t5-tf5"), ("llama-genai",)
GQA = (*GENAI, "mistral-genai", "qwen2-genai")
"""Those whose attention is one operator."""
LONE = (*FLAT, *OPTIMUM)
"""One graph for all steps, its attention spelled out."""
SPELLED_OUT = (*COMMITTED, *OPTIMUM, *TF5)
ALL = (*SPELLED_OUT, *GENAI)
