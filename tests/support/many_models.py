"""A folder of many models, some of which are broken, huge, or kill the process that runs them."""

import shutil
from pathlib import Path

import onnx
from onnx import TensorProto

from support import bad_models as bad
from support.bad_models import GPT2, MARIAN, saved

HEALTHY, UNHEALTHY, INCOMPLETE = "healthy", "unhealthy", "incomplete"
OPTIONS = ("--timeout", "3", "--max-memory", "700", "--format", "json", "--no-cache")


def declared_huge(folder: Path) -> Path:
    """Weights of 3 GB that are a hole in a sparse file, and that one decode step would need."""
    model = bad.decoder()
    head = next(one for one in model.graph.initializer if one.name == "head")
    head.CopyFrom(
        TensorProto(name="head", data_type=TensorProto.FLOAT, dims=[4, 3 << 26], data_location=TensorProto.EXTERNAL)
    )
    head.external_data.add(key="location", value="weights.bin")
    saved(model, folder)
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(3 << 30)
    return folder


def registry(root: Path, count: int) -> dict[str, str | None]:
    """Folders of models, with the verdict that each must have; None where both of the last two are right."""
    tiny = bad.decoder().SerializeToString()
    odd: list[tuple[str, str | None]] = []

    def add(name: str, verdict: str | None, content: bytes | onnx.ModelProto) -> None:
        saved(content, root / name)
        odd.append((name, verdict))

    add("empty-file", INCOMPLETE, b"")
    add("cut-short", INCOMPLETE, bad.gpt2_bytes()[:1000])
    add("noise", INCOMPLETE, bytes(range(256)) * 40)
    add("pointer", INCOMPLETE, b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n")
    add("deep", None, bad.nested(2000))
    add("classifier", INCOMPLETE, bad.classifier())
    add("kills", INCOMPLETE, bad.decoder(*bad.dividing_out_of_range()))
    add("hangs", INCOMPLETE, bad.decoder(*bad.looping_for_ever()))
    add("eats", INCOMPLETE, bad.decoder(*bad.allocating()))
    declared_huge(root / "huge")
    odd.append(("huge", None))
    hole = root / "hole"
    hole.mkdir()
    with (hole / "model.onnx").open("wb") as file:
        file.truncate(5 << 30)
    odd.append(("hole", INCOMPLETE))
    (root / "nothing").mkdir()
    odd.append(("nothing", INCOMPLETE))
    for name, source, verdict in (("marian", MARIAN, UNHEALTHY), ("gpt2", GPT2, HEALTHY)):
        shutil.copytree(source, root / name)
        odd.append((name, verdict))
    expected = dict(odd)
    for number in range(count - len(odd)):
        folder = root / f"m{number:03d}"
        saved(_varied(tiny, number), folder)
        expected[folder.name] = HEALTHY
    return expected


def _varied(content: bytes, number: int) -> onnx.ModelProto:
    """The same model with other weights."""
    model = onnx.load_from_string(content)
    head = next(one for one in model.graph.initializer if one.name == "head")
    values = onnx.numpy_helper.to_array(head) * (1 + number / 1000)
    head.CopyFrom(onnx.numpy_helper.from_array(values.astype("float32"), "head"))
    return model
