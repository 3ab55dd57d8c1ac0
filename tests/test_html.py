"""The page: every fact of the document is on it, nothing on it can act, and it stays small."""

import base64
import hashlib
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest
from support.pages import HTML, Page, assert_sound, assert_tells, kvdoctor, page, rendered, reports, revived, squeezed

from kvdoctor.findings import KnownFinding, NotChecked
from kvdoctor.report import formats
from kvdoctor.report import html as gate_page
from kvdoctor.report.blocks import plain
from kvdoctor.report.document import Report
from kvdoctor.report.page.charts import trace_slot
from kvdoctor.report.page.contract_diagram import fit, group_slots, merge_names
from kvdoctor.report.page.elements import command, h, read_style
from kvdoctor.report.repair_record import RepairRecord, RepairSide
from kvdoctor.report.sections.findings import draw_cache

EXPORTS = Path("fixtures/exports")
HOSTILE = "<script>alert(1)</script>\"'>]]>&amp;\u202egnp.\x1b[31m\x00\n::error::<img src=x onerror=alert(2)>"
QUOTED = ("path", "where", "declared", "observed", "cause", "text", "reason", "error", "producer", "words", "scope")
QUOTED += ("past", "present", "filled_by", "file", "name", "layout", "files", "notes", "subject", "effects", "evidence")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate of a sick model, a healthy one and a broken file, as HTML and JSON."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "broken").mkdir()
    (folder / "broken" / "model.onnx").write_bytes(b"\x08\x07not a model")
    models = (EXPORTS / "marian-4.46.3", EXPORTS / "gpt2", folder / "broken")
    done = kvdoctor("gate", *models, "-q", f"--output=html={folder}/gate.html", f"--output=json={folder}/gate.json")
    assert done.returncode == 1
    return folder


@pytest.fixture(scope="module")
def three(gate: Path) -> list[Report]:
    return reports(gate / "gate.json")


@pytest.fixture(scope="module")
def sick(three: list[Report]) -> Report:
    return three[0]


def test_the_page_of_a_gate_has_an_index_and_every_fact(gate: Path, three: list[Report]) -> None:
    made = page((gate / "gate.html").read_text(encoding="utf-8"))
    assert_sound(made)
    for report in three:
        assert_tells(made, report)
    first = next(made.all("table"))
    rows = [squeezed("".join(row.itertext())) for row in first.iter(f"{HTML}tr")][1:]
    assert [re.search("unhealthy|incomplete|healthy", row).group() for row in rows] == [  # type: ignore[union-attr]
        "unhealthy",
        "incomplete",
        "healthy",
    ]
    links = {link.get("href") for link in first.iter(f"{HTML}a")}
    assert links == {"#m0", "#m1", "#m2"}


@pytest.mark.parametrize("number", range(3), ids=["sick", "healthy", "broken"])
def test_the_page_of_one_model_has_every_fact(number: int, three: list[Report]) -> None:
    made = rendered(three[number])
    assert_sound(made)
    assert_tells(made, three[number])
    assert made.text.index(three[number].verdict) < made.text.index("Findings", 200)
    assert "Exitcode" + "103"[number] in made.text


def test_the_policy_allows_the_style_sheet_alone(sick: Report) -> None:
    made = rendered(sick)
    (policy,) = (meta.get("content") or "" for meta in made.all("meta") if meta.get("http-equiv"))
    (sheet,) = (element.text or "" for element in made.all("style"))
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert sheet == read_style()
    assert "</" not in sheet
    # A policy holds for what follows it.
    assert made.source.index("Content-Security-Policy") < made.source.index("<style>")


def test_no_healthy_model_looks_sick(three: list[Report]) -> None:
    """What fails by its nature (a dummy past that is attended to) does not wear the color of a fault."""
    healthy = rendered(three[1])
    assert "differs" in healthy.text
    assert not [element for element in healthy.all("span") if {"error", "bad", "failed", "differs"} & classes(element)]


def only(made: Page, name: str) -> Element:
    """The one element of a page with this class."""
    (found,) = (element for element in made.all() if name in classes(element))
    return found


def words(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_the_banner_names_the_cause_and_the_fix_of_the_worst_finding(sick: Report) -> None:
    worst = sick.findings[0]
    banner = words(only(rendered(sick), "banner"))
    assert worst.code == "KV203"
    for fact in (worst.name, "in merged", worst.cause, worst.evidence[0], worst.repair.command or "no command"):
        assert fact in banner
    known = replace(sick, findings=(replace(worst, known=KnownFinding("our loop keeps it")), *sick.findings[1:]))
    banner = words(only(rendered(replace(known, verdict="healthy")), "banner"))
    assert "KV203" not in banner
    assert "A finding that does not count as a failure:warning KV315" in banner


def test_the_banner_of_a_gate_names_the_worst_finding_of_a_model(gate: Path, sick: Report) -> None:
    made = page((gate / "gate.html").read_text(encoding="utf-8"))
    banner, *others = (words(found) for found in made.all("div") if "banner" in classes(found))
    assert len(others) == 3
    for fact in (
        sick.model.path,
        "KV203",
        sick.findings[0].evidence[0],
        sick.findings[0].repair.command or "no command",
    ):
        assert fact in banner
    row = next(words(row) for row in made.all("tr") if "KV203" in words(row))
    assert sick.findings[0].cause in row


def test_the_banner_of_a_dry_run_is_about_the_original(sick: Report) -> None:
    after = RepairSide("healthy", sick.findings[1:])
    record = RepairRecord("x", None, (), RepairSide("unhealthy", sick.findings), after, (), proved=True)
    made = rendered(replace(sick, findings=sick.findings[1:], repair=record))
    banner = words(only(made, "banner"))
    assert "dry run: the original stays unhealthy (1 error, 2 warnings, 2 notes); the repaired copy would be" in banner
    assert "KV203" in banner
    assert "1 error" in banner
    assert "Findingsthatthecopywouldhave" in made.text


def test_the_banner_says_why_there_is_no_verdict(three: list[Report]) -> None:
    unread = words(only(rendered(three[2]), "banner"))
    assert three[2].findings[0].cause in unread
    assert three[2].findings[0].repair.text in unread
    unchecked = NotChecked("merged", "KV301", "no step <completed>", essential=True)
    banner = words(only(rendered(replace(three[1], verdict="incomplete", not_checked=(unchecked,))), "banner"))
    assert "why KV301 (merged): no step <completed>" in banner.replace("why", "why ")
    assert f"kvdoctor step-test {three[1].model.path} --reference CHECKPOINT" in banner


def test_an_error_has_the_picture_of_the_cache_in_its_card(sick: Report, three: list[Report]) -> None:
    made = rendered(sick)
    (card,) = (found for found in made.all("article") if {"finding", "error"} <= classes(found))
    (table,) = (found for found in card.iter(f"{HTML}table") if "lengths" in classes(found))
    picture, quote = draw_cache(sick, sick.findings[0])
    assert picture is not None
    shown = [[words(cell) for cell in row] for row in table.iter(f"{HTML}tr")]
    assert shown == [[" ".join(plain(cell).split()) for cell in row] for row in (picture.header, *picture.rows)]
    assert [words(cell) for cell in table.iter(f"{HTML}td") if "wrong" in classes(cell)] == [
        "7 \u2192 0 empty, null pointer \u2190 here"
    ]
    assert quote is not None
    assert quote in words(card)
    assert not [table for table in rendered(three[1]).all("table") if "lengths" in classes(table)]


def test_alike_findings_of_several_stacks_are_one_card(sick: Report) -> None:
    made = rendered(sick)
    alike = [finding for finding in sick.findings if finding.code == "KV315"]
    assert [finding.stack for finding in alike] == ["merged", "pair"]
    (card,) = (words(found) for found in made.all("article") if "KV315" in words(found))
    assert "mask-not-offset in merged, pair" in card
    for finding in alike:
        assert f"{finding.fingerprint} ({finding.stack})" in card
        assert finding.where in card
    assert "1 warning" in words(only(made, "banner"))


def test_a_command_is_one_element_that_a_click_selects(sick: Report) -> None:
    made = rendered(sick)
    selected = {words(found) for found in made.all("code") if "copy" in classes(found)}
    assert {finding.repair.command for finding in sick.findings if finding.repair.command} <= selected
    assert {f"kvdoctor explain {finding.code}" for finding in sick.findings} <= selected
    assert ".copy{user-select:all;" in read_style()


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(sick: Report) -> None:
    named = replace(sick, model=replace(sick.model, path=HOSTILE))
    fragment = named._repr_html_()
    title, frame = html5lib.parseFragment(fragment)
    assert [title.tag, frame.tag] == [f"{HTML}p", f"{HTML}iframe"]
    assert "unhealthy (1 error, 2 warnings, 2 notes)" in words(title)
    assert frame.get("sandbox") == ""
    assert set(frame.keys()) == {"sandbox", "srcdoc", "title", "style"}
    source = frame.get("srcdoc")
    # Links would else be relative to the notebook, and load it into the frame.
    assert source.replace('<base href="about:srcdoc">', "", 1) == formats.render(named, "html")
    assert source.index("<base") < source.index("Content-Security-Policy")


def classes(element: Any) -> set[str]:
    return set((element.get("class") or "").split())


def test_the_pictures_say_what_the_runs_showed(sick: Report) -> None:
    made = rendered(sick)
    told = [element.get("aria-label") or "" for element in made.all() if element.get("role") == "img"]
    (emptied,) = [text for text in told if ", emptied" in text and "fails" in text]
    assert "cross-attention, layers 0 to 1, 4 slots" in emptied
    assert (
        "step 0: 0 fed, 7 returned, grown; step 1: 7 fed, 0 returned, emptied; step 2: 0 fed, the step fails" in emptied
    )
    held = [text for text in told if "step 7: 7 fed, the value of step 0 is held" in text]
    assert len(held) == 2  # the held loop of the merged decoder, and the plain one of the pair, which returns none
    assert any("step 7: 9 fed, 10 returned, grown" in text for text in told)
    (diagram, _) = [text for text in told if text.startswith("The cache contract of")]
    assert "keep the value of step 0, feed it at every step, emptied by later steps" in diagram
    timed = [text for text in told if "with the cache" in text]
    assert len(timed) == 2


def test_states_of_a_slot_come_from_its_lengths(sick: Report) -> None:
    (stack, _), runs = sick.stacks, {run.experiment: run for run in sick.runs if run.stack == "merged"}
    assert stack.contract is not None
    cross = stack.contract.of_kind("cross-attention")[0]
    assert [cell.state for cell in trace_slot(runs["plain-loop"], cross)] == ["grown", "emptied", "fails"]
    assert {cell.state for cell in trace_slot(runs["held-loop"], cross)} == {"grown", "held"}
    grown = trace_slot(runs["held-loop"], stack.contract.of_kind("self-attention")[0])
    assert [(cell.fed, cell.returned) for cell in grown[:3]] == [(0, 3), (3, 4), (4, 5)]
    assert [group.count for group in group_slots(stack.contract.slots)] == ["4 slots", "4 slots"]


def test_names_that_differ_in_numbers_are_one() -> None:
    names = [f"past_key_values.{layer}.{part}" for layer in range(24) for part in ("key", "value")]
    assert merge_names(names) == ["past_key_values.0\u202623.key", "past_key_values.0\u202623.value"]
    assert merge_names(["a", "b.1", "b.1"]) == ["a", "b.1"]
    assert merge_names(["x" + "9" * 10_000])[0].startswith("x999")  # no number that takes long to read
    assert fit("abcdefghij", 5) == "ab\u2026ij"


# --- what is hostile, and what is large -------------------------------------------------------------------------------


def hostile(value: Any, name: str = "") -> Any:
    """A document whose free texts are hostile."""
    if isinstance(value, dict):
        return {key: item if key == "cache" else hostile(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, name) for item in value]
    return HOSTILE + value if isinstance(value, str) and name in QUOTED else value


def test_hostile_names_are_text(sick: Report) -> None:
    report = revived(hostile(sick.to_dict()))
    made = rendered(report, report)
    assert_sound(made)
    assert "<script>alert(1)</script>" in "".join(made.root.itertext())
    shown = "".join(made.root.itertext())
    assert not set(shown) & set("\u202e\x1b\x00")
    assert "\\u202egnp.\\x1b[31m\\x00\\x0a" in shown


def test_elements_that_could_act_cannot_be_made() -> None:
    for tag in ("script", "style", "img", "iframe", "link", "p onclick=x", "p><script"):
        with pytest.raises(ValueError, match="a page has no"):
            h(tag)
    for attribute in ("onclick", "src", "style", "srcset", 'x="y" onload'):
        with pytest.raises(ValueError, match="a page has no attribute"):
            h("p", **{attribute: "x"})
    for target in ("javascript:alert(1)", "https://example.org", "#a b", "//x"):
        with pytest.raises(ValueError, match="the page itself"):
            h("a", "x", href=target)
    assert str(h("p", "<b>", h("b", '"'), title='"><x>\u202e')) == (
        '<p title="&quot;&gt;&lt;x&gt;\\u202e">&lt;b&gt;<b>&quot;</b></p>'
    )
    once = h("p", (word for word in ("a", "b")))
    assert [str(once), str(once)] == ["<p>ab</p>"] * 2


def test_a_command_stays_whole_or_says_that_it_is_not() -> None:
    long = "kvdoctor re-export '" + "a/" * 2000 + "' -o FIXED"
    assert long in page_of(command(long)).replace("&#x27;", "'")
    assert "shown as escapes" not in page_of(command(long))
    assert "shown as escapes" in page_of(command("kvdoctor re-export 'a\nb' -o FIXED"))


def page_of(element: Any) -> str:
    return str(element)


def test_ten_megabytes_of_name_are_shortened(sick: Report) -> None:
    giant = "n<" * 5_000_000
    finding = replace(sick.findings[0], cause=giant, where=giant, observed=giant, subject=(giant,) * 40)
    file = replace(sick.model.files[0], path=giant, producer=giant)
    stack = replace(sick.stacks[0], name=giant, files=(giant,) * 30)
    model = replace(sick.model, path=giant, files=(file,))
    began = time.process_time()
    made = formats.render(replace(sick, findings=(finding,), model=model, stacks=(stack,), notes=(giant,)), "html")
    assert len(made) < 200_000
    assert time.process_time() - began < 3
    assert_sound(page(made))


def test_a_thousand_findings_and_steps_stay_bounded(sick: Report) -> None:
    findings = tuple(replace(finding, code=f"KV{n}") for n in range(1000) for finding in sick.findings[:1])
    long = next(run for run in sick.runs if run.experiment == "held-loop" and run.steps)
    steps = tuple(replace(long.steps[-1], step=number, past_length=number) for number in range(1000))
    runs = tuple(replace(run, steps=steps) if run is long else run for run in sick.runs)
    unchecked = tuple(replace(sick.not_checked[0], reason=f"reason {n}") for n in range(1000))
    report = replace(sick, findings=findings, runs=runs, not_checked=unchecked)
    made = rendered(report)
    assert_sound(made)
    assert len(made.source) < 800_000
    for line in (
        "400 more findings in one line each",
        "500 more findings are not shown here",
        "600 more checks are not shown here",
        "960 more steps are not shown here",
        "976 steps in the middle are not drawn.",
        "976 steps in the middle are not shown.",
    ):
        assert squeezed(line) in made.text, line


def test_a_gate_of_very_many_stays_bounded_and_names_all(three: list[Report], monkeypatch: pytest.MonkeyPatch) -> None:
    many = [replace(report, model=replace(report.model, path=f"m{n}")) for n in range(20) for report in three]
    worst = len(str(gate_page._model(0, many[0])))
    monkeypatch.setattr(gate_page, "LARGEST", worst * 5 // 2)
    made = rendered(*many)
    assert_sound(made)
    assert len(made.source) < worst * 4
    rows = [squeezed("".join(row.itertext())) for row in next(made.all("table")).iter(f"{HTML}tr")][1:]
    assert len(rows) == 60
    assert [row.startswith(("m0un", "m1un")) for row in rows[:3]] == [True, True, False]
    told = [element for element in made.all("article") if "model" in classes(element)]
    assert len(told) == 3, "the first that pass the limit together"
    assert f"{60 - len(told)}modelsmore,withthebestverdicts" in made.text


def test_the_page_is_the_same_each_time(sick: Report) -> None:
    assert formats.render(sick, "html") == formats.render(sick, "html")
    untimed = replace(sick, measured={})
    assert "Time per step" not in formats.render(untimed, "html")


def test_an_inspection_tells_what_was_asked(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = kvdoctor("inspect", EXPORTS / "llama-gqa", "--batch=2", "--format=html", f"--output=html={file}")
    assert done.returncode == 0
    assert done.stdout == file.read_text(encoding="utf-8")
    made = page(done.stdout)
    assert_sound(made)
    for word in ("nothing found", "Memory plan for 2 sequences", "Inputs and outputs of", "No decode step was run"):
        assert squeezed(word) in made.text, word
