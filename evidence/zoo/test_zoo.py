"""The zoo: tiny exports of many architectures and what kvdoctor must say of each, no more and no less.

The sample runs with the other tests. The whole zoo needs isolated environments and minutes: `-m slow`, or `-m zoo` for
the zoo alone.
"""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array
from support.isolated import give_up
from support.sampling import EXHAUSTIVE, sampled

from evidence.zoo import (
    genai_exports,
    genai_table,
    make_page,
    optimum_exports,
    optimum_table,
    transformers_exports,
    transformers_table,
    variants,
    variants_table,
)
from evidence.zoo.diagnosis import diagnose
from evidence.zoo.making import Maker
from evidence.zoo.row import CONSUMERS, Row
from evidence.zoo.tables import ROWS, SAMPLE
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.repair.pipeline import re_export
from kvdoctor.repair.session import RepairRequest
from kvdoctor.runtime.client import Runtime

pytestmark = pytest.mark.zoo

MANY = 100
"""Rows that the zoo has at least."""


def parameters() -> list[object]:
    """Every row: exports with all that a thorough diagnosis tries, their copies and the sample as people run it.

    The copies have the graphs of the exports; two of three, and what a thorough diagnosis says of them and of every
    fourth export, are left to `-m exhaustive`.
    """
    slow, exhaustive = (pytest.mark.slow,), (pytest.mark.slow, pytest.mark.exhaustive)
    exports = [row for row in ROWS if row.variant == "exported"]
    seldom = {*exports[3::4]}
    thorough = [
        pytest.param(
            row,
            True,
            id=f"{row}-thorough",
            marks=slow if row.variant == "exported" and row not in seldom else exhaustive,
        )
        for row in ROWS
    ]
    copies = [row for row in ROWS if row.variant != "exported" and row not in SAMPLE]
    quick = [pytest.param(row, False, id=str(row)) for row in SAMPLE]
    default = [
        pytest.param(row, False, id=str(row), marks=exhaustive if number % 3 else slow)
        for number, row in enumerate(copies)
    ]
    return [*quick, *default, *thorough]


@pytest.mark.parametrize(("row", "thorough"), parameters())
def test_kvdoctor_says_what_is_true(row: Row, thorough: bool, maker: Maker, runtime: Runtime) -> None:
    made = maker.make(row)
    if made.obstacle:
        give_up(made.obstacle)
    if made.failure and row.exporter == "committed":
        give_up(f"the onnxruntime of this Python does not make it: {made.failure}")
    assert made.failure is None

    seen = diagnose(made.folder, runtime, thorough)

    assert seen.stacks == row.stacks, seen.details
    for consumer in CONSUMERS:
        assert row.allows(consumer, seen.told[consumer]), f"{seen.told[consumer]}\n{seen.details}"
        assert seen.verdicts[consumer] in row.verdicts(consumer), seen.details
    assert seen.largest is not None or "healthy" not in row.verdicts("held"), seen.details
    if seen.largest is not None and not row.noisy:
        assert seen.largest <= row.largest


def emptied() -> list[Row]:
    """Every row whose merged decoder is right where the loop holds its cross cache, and not where it feeds it back."""
    sick = [row for row in ROWS if "cross-cache-emptied" in {each.check for each in row.faults}]
    return [row for row in sick if "unhealthy" not in row.verdicts("held")]


@pytest.mark.slow
@pytest.mark.parametrize("row", sampled(emptied(), 4, EXHAUSTIVE), ids=str)
def test_a_merged_decoder_passes_the_plain_loop_when_repaired(row: Row, maker: Maker, tmp_path: Path) -> None:
    made = maker.make(row)
    if made.obstacle or made.failure:
        give_up(made.obstacle or f"the onnxruntime of this Python does not make it: {made.failure}")
    report = re_export(RepairRequest(str(made.folder), str(tmp_path / "out")), Options())
    assert report.repair is not None
    assert report.repair.proved, [entry for entry in report.repair.proof if not entry.holds]
    loop = next(r for r in report.runs if (r.stack, r.experiment) == ("merged", "plain-loop"))
    assert loop.outcome in (("passed", "ambiguous", "inconclusive") if row.noisy else ("passed",))
    assert report.verdict != "unhealthy"


@pytest.mark.slow
def test_a_fault_in_a_dynamo_export_leads_to_the_line_of_the_model(
    maker: Maker, runtime: Runtime, tmp_path: Path
) -> None:
    row = next(row for row in ROWS if (row.architecture, row.variant) == ("llama-dynamo", "exported"))
    made = maker.make(row)
    if made.obstacle:
        give_up(made.obstacle)
    model = onnx.load(made.folder / "model.onnx")
    attention = "'model.layers.1.self_attn', 'scaled_dot_product_attention"
    baked = next(
        node
        for node in model.graph.node
        if node.op_type == "Reshape" and any(attention in entry.value for entry in node.metadata_props)
    )
    model.graph.initializer.append(from_array(np.array([-1, 8, 8]), "sample_sizes"))
    baked.input[1] = "sample_sizes"
    onnx.save(model, tmp_path / "model.onnx")

    error = step_test(str(tmp_path), Options(), runtime).findings[0]

    (source,) = error.sources
    assert (source.node, source.module, source.kind) == (baked.name, "model.layers.1.self_attn", "LlamaAttention")
    assert source.line is not None
    assert re.fullmatch(r"llama/modeling_llama\.py:\d+ forward", source.line)


def test_every_row_is_another_export() -> None:
    assert len({str(row) for row in ROWS}) == len(ROWS) > MANY
    assert len({make_page.key(row) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("exporter", "known", "left_out"),
    [
        ("optimum", {*optimum_exports.BY_NAME}, optimum_table.LEFT_OUT),
        (
            "transformers",
            {*transformers_exports.RECIPES, *transformers_exports.MORE_RECIPES},
            transformers_table.LEFT_OUT,
        ),
        ("genai", {*genai_exports.RECIPES}, genai_table.LEFT_OUT),
    ],
    ids=["optimum", "transformers", "genai"],
)
def test_every_export_has_its_row_or_a_reason(exporter: str, known: set[str], left_out: dict[str, str]) -> None:
    rows = {row.architecture for row in ROWS if row.exporter == exporter}
    assert not rows & set(left_out)
    assert rows | set(left_out) == known


def test_every_tool_has_its_rows() -> None:
    assert set(variants_table.KINDS) == set(variants.KINDS)
    assert {row.architecture for row in variants_table.ROWS} == set(variants_table.SOURCES)


def test_the_document_lists_the_rows_as_they_are() -> None:
    text = make_page.DOCUMENT.read_text(encoding="utf-8")
    measured = make_page.read(text)
    assert list(measured) == [make_page.key(row) for row in ROWS]
    assert make_page.page(measured) == text
    for row in ROWS:
        cells = measured[make_page.key(row)]
        for consumer, cell in zip(CONSUMERS, (cells.plain, cells.held), strict=True):
            assert cell.partition(":")[0] in row.verdicts(consumer)
            told = {check for check, _, _ in row.told(consumer)}
            seen = set(cell.partition(": ")[2].split(", ")) - {""}
            assert seen <= told if row.noisy else seen == told


def test_who_comes_second_waits_for_what_the_first_one_made(tmp_path: Path) -> None:
    from evidence.zoo.making import first_one_does

    assert first_one_does(tmp_path / "batch", lambda: {"said": "made"}) == {"said": "made"}
    assert first_one_does(tmp_path / "batch", lambda: {"said": "made again"}) == {"said": "made"}
