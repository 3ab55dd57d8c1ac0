"""The health page: held to the stored results, and a sample of the results to new runs of the command line."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import chromium
from support.isolated import give_up
from support.sampling import EXHAUSTIVE, first, sampled

from evidence.health import html_table, make_page, measure
from evidence.health.exports import Export, exports, make_missing, sources
from evidence.health.rows import NOT_EXPORTABLE, NOT_RUN, STATES, rows, turns

DOCUMENT: dict[str, Any] = json.loads(make_page.STORE.read_text(encoding="utf-8"))
NEWEST = DOCUMENT["releases"][0]
BROWSER = chromium.found()
EVERY = [export for source in sources() for export in exports(source, Path("nowhere"))]
COMMITTED = [export for export in EVERY if not export.source.folder]
AGAIN = [
    ("optimum-onnx 0.1.0", "transformers 4.46.3", "gpt2"),
    ("torch.onnx TorchScript 2.13.0", "transformers 4.51.3", "llama"),
    ("torch.onnx TorchScript 2.13.0", "transformers 4.57.6", "llama"),
    ("transformers 5.23.0", "torch 2.13.0", "llama-fixed"),
]
"""Exports that the slow test makes again: healthy ones, one that is repaired, one that cannot be made."""


def test_the_pages_are_made_from_the_stored_results() -> None:
    assert make_page.PAGE.read_text(encoding="utf-8") == make_page.page(DOCUMENT)
    assert make_page.TABLE.read_text(encoding="utf-8") == html_table.page(DOCUMENT)
    assert make_page.STORE.read_text(encoding="utf-8") == measure.dump(DOCUMENT)


def test_every_result_has_its_export_and_says_something() -> None:
    keys = [export.key for export in EVERY]
    assert len(set(keys)) == len(keys)
    assert set(DOCUMENT["exports"]) <= set(keys)
    assert not set(re.findall(r"/(?:tmp|root|home|work)/", json.dumps(DOCUMENT)))
    for row in rows(DOCUMENT):
        for cell in row.cells.values():
            assert cell.state in STATES
            assert bool(cell.errors) or cell.state not in ("repaired", "refused"), row
            assert bool(cell.repairs) == (cell.state == "repaired"), row
            assert bool(cell.why) == (cell.state in ("refused", "not checked", NOT_EXPORTABLE)), row


@pytest.mark.parametrize("export", COMMITTED, ids=lambda each: each.name)
def test_results_of_the_files_of_the_repository_are_of_these_files(export: Export) -> None:
    assert DOCUMENT["exports"][export.key]["digest"] == export.digest()


def test_what_was_not_run_is_not_guessed() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["releases"].append("1.15.1")
    for row in rows(document):
        made = row.cells[NEWEST].state != NOT_EXPORTABLE
        assert row.cells["1.15.1"].state == (NOT_RUN if made else NOT_EXPORTABLE)


def test_names_and_messages_are_escaped() -> None:
    hostile = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>|`*_['
    entry = copy.deepcopy(DOCUMENT["exports"][COMMITTED[0].key])
    for cell in entry["cells"].values():
        for facts in cell["stacks"].values():
            facts.update(state="refused", errors=[hostile], warnings=[hostile], why=hostile, layout=hostile)
    entry |= {"exporter": hostile, "beside": hostile, "name": hostile}
    failed = {**entry, "name": f"2{hostile}", "not_exported": hostile}
    document = {**DOCUMENT, "exports": {"a": entry, "b": failed}}
    html, markdown = html_table.page(document), make_page.page(document)
    assert html.count("<script") == 1
    assert "<img" not in html
    assert re.search(r"(?<!\\)<(script|img)", markdown) is None
    tables = re.split(r"\n\n", markdown)
    for table in (part for part in tables if part.startswith("| ")):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines() if line}) == 1, table


def test_a_new_result_is_a_change_and_a_first_one_is_not() -> None:
    before = DOCUMENT["exports"][COMMITTED[0].key]
    after = copy.deepcopy(before)
    stack = next(iter(after["cells"][NEWEST]["stacks"]))
    after["cells"][NEWEST]["stacks"][stack].update(state="refused", errors=["step-fails"], repairs=[])
    after["cells"]["9.9.9"] = after["cells"][NEWEST]
    (change,) = measure.changes("key", before, after)
    assert (change["runtime"], change["stack"]) == (NEWEST, stack)
    assert change["after"].startswith("refused (step-fails")
    lost = {**before, "not_exported": "no", "cells": {}}
    assert [each["after"] for each in measure.changes("key", before, lost)] == ["not exportable"]
    assert measure.changes("key", before, before) == []


def test_a_release_that_changed_a_result_is_named() -> None:
    old, new = (copy.deepcopy(DOCUMENT["exports"][COMMITTED[0].key]) for _ in range(2))
    old["beside"], new["beside"] = "transformers 4.9.1", "transformers 4.10.0"
    for facts in new["cells"][NEWEST]["stacks"].values():
        facts["warnings"] = [*facts["warnings"], "chunk-fails"]
    (turn,) = turns({**DOCUMENT, "exports": {"new": new, "old": old}})
    assert turn.since == "transformers 4.10.0"
    assert "chunk-fails" in turn.after
    assert "chunk-fails" not in turn.before
    assert turns({**DOCUMENT, "exports": {"a": old, "b": {**old, "beside": "transformers 4.10.0"}}}) == []


def test_a_cell_with_a_result_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    export = COMMITTED[0]
    stored = DOCUMENT["exports"][export.key]
    releases = list(stored["cells"])
    monkeypatch.setattr(measure, "measure", lambda path, release: pytest.fail(f"{path} was run in {release}"))
    assert measure.look(export, stored, releases, again=False) == stored


@pytest.fixture
def tab() -> Iterator[chromium.Tab]:
    if BROWSER is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    with chromium.tab(BROWSER) as opened:
        yield opened


def test_the_table_is_filtered_in_a_browser(tab: chromium.Tab) -> None:
    tab.size(400)
    tab.open(make_page.TABLE.as_uri())
    total = len(rows(DOCUMENT))
    shown = "[...document.querySelectorAll('tbody tr')].filter(line => line.offsetHeight > 0).length"
    assert tab.evaluate(shown) == total
    put = "form.text.value = {!r}; form.result.value = {!r}; form.dispatchEvent(new Event('input')); found.value"
    fixtures = sum("(fixture)" in row.name for row in rows(DOCUMENT))
    assert tab.evaluate(put.format("FIXTURE optimum", "")) == f"{fixtures} of {total} lines"
    assert tab.evaluate(shown) == fixtures
    repaired = sum(any(cell.state == "repaired" for cell in row.cells.values()) for row in rows(DOCUMENT))
    assert tab.evaluate(put.format("", "repaired")) == f"{repaired} of {total} lines"
    assert tab.evaluate(put.format("<nothing>", "")) == f"0 of {total} lines"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not [event for event in tab.events if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]


@pytest.mark.parametrize("name", ["gpt2 (fixture)", "gpt by hand: mask-square"])
def test_a_result_comes_out_again(name: str) -> None:
    export = next(each for each in COMMITTED if each.name == name)
    assert_comes_out_again(export, [measure.onnxruntime.__version__])


@pytest.mark.slow
@pytest.mark.parametrize("export", sampled(COMMITTED, 7, EXHAUSTIVE), ids=lambda each: each.name)
def test_the_results_of_the_repository_come_out_again(export: Export) -> None:
    stored = DOCUMENT["exports"][export.key]["cells"]
    assert_comes_out_again(export, [release for release in stored if release in DOCUMENT["releases"]])


@pytest.mark.slow
@pytest.mark.parametrize(("exporter", "beside", "name"), first(AGAIN, 2))
def test_an_export_that_is_made_again_has_the_same_results(
    exporter: str, beside: str, name: str, tmp_path: Path
) -> None:
    source = next(s for s in sources() if (s.exporter, s.beside) == (exporter, beside) and s.folder)
    if (obstacle := make_missing(source, tmp_path, (name,))) is not None:
        give_up(obstacle)
    export = next(each for each in exports(source, tmp_path) if each.name == name)
    assert_comes_out_again(export, [measure.onnxruntime.__version__])


def assert_comes_out_again(export: Export, releases: list[str]) -> None:
    stored = DOCUMENT["exports"][export.key]
    looked = measure.look(export, {}, releases, again=True)
    assert looked is not None
    assert looked["not_exported"] == stored["not_exported"]
    for release in looked["cells"]:
        if release in stored["cells"]:
            assert looked["cells"][release] == stored["cells"][release]
