"""Repairs that change what a graph computes at other sizes: proved, or refused with the reason."""

import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from support.proofs import repair_of
from support.sampling import sampled
from support.text_fixtures import FOLDER, read

from kvdoctor.options import Options
from kvdoctor.repair.pipeline import re_export
from kvdoctor.repair.session import RepairRequest
from kvdoctor.report.document import Report

ROOT = Path(__file__).parent.parent
SCRATCH = ROOT / "fixtures" / "from_scratch"
REPAIRS = (
    "free-batch",
    "free-past",
    "free-sequence",
    "free-baked-sizes",
    "empty-past",
    "finite-constants",
    "offset-mask",
    "offset-positions",
)


def repaired(source: Path, out: Path) -> Report:
    return re_export(RepairRequest(str(source), str(out)), Options())


def names(report: Report) -> list[str]:
    """The repairs looked at here; weights that are stored twice are merged as well."""
    return sorted({repair.name for repair in repair_of(report).repairs}.intersection(REPAIRS))


def is_proved(report: Report) -> bool:
    return repair_of(report).proved and report.verdict == "healthy" and repair_of(report).out is not None


@pytest.mark.parametrize(
    ("fixture", "repair"),
    sampled(
        [
            ("step-fails", "free-baked-sizes"),
            ("step-fails-batch", "free-baked-sizes"),
            ("step-fails-expand", "free-baked-sizes"),
            ("step-fails-encoder-length", "free-baked-sizes"),
            ("empty-past-rejected", "empty-past"),
            ("chunk-fails", "free-baked-sizes"),
            ("past-axis-frozen", "free-past"),
            ("past-axis-frozen-pair", "free-past"),
            ("sequence-axis-frozen", "free-sequence"),
            ("batch-axis-frozen", "free-batch"),
        ],
        4,
    ),
)
def test_a_frozen_size_is_freed_and_proved(fixture: str, repair: str, tmp_path: Path) -> None:
    report = repaired(read(FOLDER / f"{fixture}.onnxtxt").write(tmp_path / "sick"), tmp_path / "out")
    assert is_proved(report)
    assert names(report) == [repair]


@pytest.mark.parametrize(
    ("file", "repairs"),
    sampled(
        [
            ("axes-batch-only", ["free-past", "free-sequence"]),
            ("axes-first-layer-only", ["free-batch", "free-past"]),
            ("axes-past-only", ["free-batch", "free-sequence"]),
            ("axes-past-only-dynamo", ["free-batch", "free-sequence"]),
            ("mask-is-causal", ["offset-mask"]),
            ("mask-square", ["offset-mask"]),
            ("mask-top-left", ["offset-mask"]),
            ("mask-top-left-dynamo", ["offset-mask"]),
            ("mask-top-left-stacked", ["offset-mask"]),
            ("positions-restart", ["offset-positions"]),
            ("positions-restart-dynamo", ["offset-positions"]),
            ("positions-restart-rotary", ["offset-positions"]),
        ],
        5,
    ),
)
def test_decoders_written_by_hand_are_repaired_and_proved(file: str, repairs: list[str], tmp_path: Path) -> None:
    report = repaired(SCRATCH / f"{file}.onnx", tmp_path / "out")
    assert is_proved(report)
    assert names(report) == repairs


@pytest.mark.parametrize("file", sampled(["axes-none", "axes-none-dynamo"], 2))
def test_positions_that_were_folded_are_not_made_up(file: str, tmp_path: Path) -> None:
    """The row of the table of positions for a past of 5 is all that is left of it."""
    report = repaired(SCRATCH / f"{file}.onnx", tmp_path / "out")
    assert not repair_of(report).proved
    assert not (tmp_path / "out").exists()
    reason = next(entry for entry in repair_of(report).not_repaired if entry.finding == "past-axis-frozen")
    assert "[1, 32]" in reason.reason
    assert "not in the file" in reason.reason
    assert "export again" in reason.instead


@pytest.mark.parametrize("export", sampled(["gpt2", "llama-gqa", "t5", "whisper", "marian-4.46.3"], 5))
def test_healthy_graphs_get_none_of_these_changes(export: str, tmp_path: Path) -> None:
    report = repaired(ROOT / "fixtures" / "exports" / export, tmp_path / "out")
    assert not names(report)


def test_a_repaired_graph_gives_the_same_bits_where_the_original_was_right(tmp_path: Path) -> None:
    """Every size that the original takes; it takes any batch, a past of 5 and one new token."""
    assert is_proved(repaired(SCRATCH / "axes-batch-only.onnx", tmp_path / "out"))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    files = (SCRATCH / "axes-batch-only.onnx", tmp_path / "out" / "axes-batch-only.onnx")
    old, new = (ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]) for file in files)
    for batch in (1, 2, 5):
        random = np.random.default_rng(batch)
        feeds = {"input_ids": random.integers(0, 128, (batch, 1))}
        for port in old.get_inputs()[1:]:
            feeds[port.name] = random.standard_normal((batch, 4, 5, 8)).astype(np.float32)
        for before, after in zip(old.run(None, feeds), new.run(None, feeds), strict=True):
            assert np.array_equal(before, after)
    feeds = {name: value if name == "input_ids" else np.repeat(value, 3, axis=2) for name, value in feeds.items()}
    with pytest.raises(Exception, match="invalid dimensions"):
        old.run(None, feeds)
    assert new.run(None, feeds)[0].shape == (5, 1, 128)


def test_the_original_is_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "sick").mkdir()
    source = tmp_path / "sick" / "model.onnx"
    shutil.copy(SCRATCH / "axes-first-layer-only.onnx", source)
    before = source.read_bytes()
    assert is_proved(repaired(source, tmp_path / "out"))
    assert source.read_bytes() == before
