"""A fault has the same fingerprint wherever its file lies and whatever it is called; two faults have two."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from support.text_fixtures import FOLDER, compile_text, read

from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.run_checks import with_distinct_fingerprints
from kvdoctor.report.document import Report

EXPORT = FOLDER.parent / "exports" / "marian-4.46.3"
MERGED = "decoder_model_merged.onnx"


def by_check(report: Report, stack: str | None = None) -> dict[str, str]:
    """Fingerprints by the name of the check and the first subject."""
    found = [finding for finding in report.findings if stack in (None, finding.stack)]
    return {f"{f.name} {f.subject[0] if f.subject[0] != f.file else ''}": f.fingerprint for f in found}


@pytest.fixture(scope="module")
def whole() -> Report:
    return inspect(str(EXPORT))


def test_every_finding_of_a_model_has_its_own(whole: Report) -> None:
    prints = [finding.fingerprint for finding in whole.findings]
    assert prints
    assert len(set(prints)) == len(prints)
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in prints)


def test_another_name_of_file_folder_and_stack_changes_nothing(whole: Report, tmp_path: Path) -> None:
    moved = shutil.copytree(EXPORT, tmp_path / "elsewhere" / "marian")
    (moved / MERGED).rename(moved / "decoder_model_merged_mine.onnx")
    (moved / "encoder_model.onnx").rename(moved / "encoder_model_mine.onnx")
    before, after = by_check(whole, "merged"), by_check(inspect(str(moved)), "merged-mine")
    assert before
    assert before == after


def test_an_anonymous_file_has_the_fingerprints_of_the_named_one(tmp_path: Path) -> None:
    shutil.copy(EXPORT / MERGED, tmp_path / MERGED)
    named = by_check(inspect(str(tmp_path / MERGED)))
    (tmp_path / MERGED).rename(tmp_path / "x.onnx")
    assert by_check(inspect(str(tmp_path / "x.onnx"))) == named


def test_another_order_of_nodes_changes_nothing(tmp_path: Path) -> None:
    before = by_check(inspect(str(EXPORT / MERGED)))
    model = onnx.load(EXPORT / MERGED)
    for graph in (model.graph, *(a.g for node in model.graph.node for a in node.attribute if a.HasField("g"))):
        _shuffle(graph)
    onnx.save(model, tmp_path / MERGED)
    assert by_check(inspect(str(tmp_path / MERGED))) == before


def _shuffle(graph: onnx.GraphProto) -> None:
    """What reads nothing goes to the front, the last first."""
    sources = [node for node in graph.node if not node.input]
    others = [node for node in graph.node if node.input]
    assert len(sources) > 1 or len(graph.node) == 1
    del graph.node[:]
    graph.node.extend([*reversed(sources), *others])


def test_the_graphs_and_variants_of_a_model_differ(tmp_path: Path) -> None:
    (content,) = read(FOLDER / "axis-name-collision.onnxtxt").files.values()
    text, plain = compile_text(content), tmp_path / "plain.onnx"
    onnx.save(text, plain)
    big = onnx.helper.make_tensor("spare", onnx.TensorProto.FLOAT16, [4096, 64], b"\0" * (4096 * 64 * 2), raw=True)
    text.graph.initializer.append(big)
    onnx.save(text, tmp_path / "other.onnx")
    one, other = by_check(inspect(str(plain))), by_check(inspect(str(tmp_path / "other.onnx")))
    assert set(one) == set(other)
    assert not set(one.values()) & set(other.values())


def test_the_same_fault_in_two_like_files_is_numbered_by_their_names(tmp_path: Path) -> None:
    for name in ("decoder_model_merged_a.onnx", "decoder_model_merged_b.onnx"):
        shutil.copy(EXPORT / MERGED, tmp_path / name)
    report = inspect(str(tmp_path))
    prints = {finding.fingerprint: finding for finding in report.findings}
    assert len(prints) == len(report.findings)
    alone = by_check(inspect(str(EXPORT / MERGED)))
    assert set(alone.values()) == {value for value, finding in prints.items() if "merged_a" in (finding.file or "")}


def test_words_and_numbers_are_no_part_of_it(whole: Report) -> None:
    """What the frame hashes is told by the docstring; here: the order of findings does not renumber them."""
    findings = list(whole.findings)
    random.Random(1).shuffle(findings)  # noqa: S311
    told = {
        json.dumps([f.name, f.stack, f.subject]): f.fingerprint for f in with_distinct_fingerprints(tuple(findings))
    }
    assert told == {json.dumps([f.name, f.stack, f.subject]): f.fingerprint for f in whole.findings}
    doubled = with_distinct_fingerprints((findings[0], replace(findings[0], stack="zz")))
    assert doubled[0].fingerprint == findings[0].fingerprint != doubled[1].fingerprint
