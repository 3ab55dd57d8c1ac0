"""The page: every fact of the document is on it, nothing on it can act, and it stays small."""

import base64
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array, to_array
from support import chromium
from support.pages import HTML, assert_sound, assert_tells, page, rendered, reports, revived, squeezed
from support.text_fixtures import compile_text, load_all

from kvdoctor.report import formats
from kvdoctor.report import html as gate_page
from kvdoctor.report.document import Report
from kvdoctor.report.page.blocks import command, read_style
from kvdoctor.report.page.cache_chart import trace_slot
from kvdoctor.report.page.grouping import fit, group_slots, merge_names
from kvdoctor.report.page.markup import h

EXPORTS = Path("fixtures/exports")
ROOT = Path(__file__).parent.parent
HOSTILE = "<script>alert(1)</script>\"'>]]>&amp;\u202egnp.\x1b[31m\x00\n::error::<img src=x onerror=alert(2)>"
QUOTED = ("path", "where", "declared", "observed", "cause", "text", "reason", "error", "producer", "words", "scope")
QUOTED += ("past", "present", "filled_by", "file", "name", "layout", "files", "notes", "subject", "effects", "evidence")


def kvdoctor(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-m", "kvdoctor", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode in (0, 1, 3), done.stderr
    return done


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
    held = [text for text in told if "step 7: 7 fed, the value of step 0 is kept" in text]
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
    assert {cell.state for cell in trace_slot(runs["held-loop"], cross)} == {"grown", "kept"}
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
    report = replace(sick, findings=findings, runs=runs, not_checked=sick.not_checked * 1000)
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
    monkeypatch.setattr(gate_page, "LARGEST", 200_000)
    monkeypatch.setattr(gate_page, "LARGEST_BRIEF", 120_000)
    many = [replace(report, model=replace(report.model, path=f"m{n}")) for n in range(20) for report in three]
    made = rendered(*many)
    assert_sound(made)
    assert len(made.source) < 500_000
    rows = [squeezed("".join(row.itertext())) for row in next(made.all("table")).iter(f"{HTML}tr")][1:]
    assert len(rows) == 60
    assert [row.startswith(("m0un", "m1un")) for row in rows[:3]] == [True, True, False]
    told = [element for element in made.all("article") if "model" in classes(element)]
    assert 3 <= len(told) < 20
    assert f"{60 - len(told)}modelsmore,withthebestverdicts" in made.text
    assert "Inbrief:" in made.text


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


# --- in a browser -----------------------------------------------------------------------------------------------------


BROWSER = chromium.found()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here (apt-get install chromium)")
WORTH_A_LOOK = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Audits.issueAdded")


def layered(count: int) -> onnx.ModelProto:
    """A decoder of so many layers, a healthy one with the Attention operator of opset 23."""
    text = load_all()["layout-attention-23-healthy"].files["model.onnx"]
    head, _, body = text.partition("{\n")
    layer = re.search(r"  q1 = .*?x2 = Add \(x1, out1\)\n", body, re.DOTALL)
    assert layer is not None
    more = ""
    for n in range(2, count):
        one = re.sub(r"\b(q|k|v|mixed|out)1\b", rf"\g<1>{n}", layer.group())
        one = re.sub(r"\bx([12])\b", lambda found, n=n: f"x{n + int(found[1]) - 1}", one).replace(".1.", f".{n}.")
        more += re.sub(r"w_([qkvo])1", rf"w_\g<1>{n}", one)
    body = body.replace(layer.group(), layer.group() + more).replace("(x2, w_logits)", f"(x{count}, w_logits)")
    for line in re.findall(r"^ .*\.1\..*$", head, re.MULTILINE):
        added = ",\n".join(line.rstrip(",").replace(".1.", f".{n}.") for n in range(2, count))
        head = head.replace(line, f"{line.rstrip(',')},\n{added}" + ("," if line.endswith(",") else ""))
    weights = re.search(r"  float\[8, 8\] w_q1.*$", head, re.MULTILINE)
    assert weights is not None
    added = ",\n".join(re.sub(r"w_([qkvo])1", rf"w_\g<1>{n}", weights.group()) for n in range(2, count))
    model = compile_text(head.replace(weights.group(), f"{weights.group()},\n{added}") + "{\n" + body)
    for weight in model.graph.initializer:
        if weight.name.startswith("w_o"):
            # What each of many layers adds is small: the logits must not be lost in rounding.
            weight.CopyFrom(from_array(to_array(weight) * np.float32(1 / count), weight.name))
    return model


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Report]]]:
    """The page of each kind of report, written by the command line, with the reports that it is made of."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "layers").mkdir()
    onnx.save(layered(48), folder / "layers" / "model.onnx")
    (folder / "broken").mkdir()
    (folder / "broken" / "model.onnx").write_bytes(b"")
    name = folder / "<script>alert(1)</script> '\" \u202e;$(id)"
    odd = load_all()["present-drops-past"].write(name)
    calls: dict[str, list[str | Path]] = {
        "sick": ["step-test", EXPORTS / "marian-4.57.6"],
        "whisper": ["step-test", EXPORTS / "whisper"],
        "layers": ["step-test", folder / "layers"],
        "hostile": ["step-test", odd],
        "broken": ["step-test", folder / "broken"],
        "fixed": ["re-export", EXPORTS / "marian-4.46.3", "-o", folder / "fixed"],
        "repro": ["repro", EXPORTS / "marian-4.46.3", "-o", folder / "repro"],
        "gate": ["gate", EXPORTS / "gpt2", EXPORTS / "t5", folder / "broken", EXPORTS / "llama-gqa"],
    }
    made = {}
    for kind, call in calls.items():
        html, facts = folder / f"{kind}.html", folder / f"{kind}.json"
        kvdoctor(*call, "-q", f"--output=html={html}", f"--output=json={facts}")
        made[kind] = (html, reports(facts))
    return made


KINDS = ("sick", "whisper", "layers", "hostile", "broken", "fixed", "repro", "gate")


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Tab]:
    assert BROWSER is not None
    with chromium.tab(BROWSER) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_the_command_line_have_every_fact(kind: str, pages: dict[str, tuple[Path, list[Report]]]) -> None:
    file, told = pages[kind]
    made = page(file.read_text(encoding="utf-8"))
    assert_sound(made)
    for report in told:
        assert_tells(made, report)
    if kind == "layers":
        assert told[0].verdict == "healthy"
        assert len(told[0].stacks[0].contract.slots) == 96  # type: ignore[union-attr]
        assert file.stat().st_size < 200_000
        assert "layers0to47" in made.text
    if kind == "fixed":
        beside = file.parent / "fixed" / "kvdoctor-report.html"
        assert_sound(page(beside.read_text(encoding="utf-8")))
        for title in ("Before and after", "Repairs", "Proof", "Undo", "Findings now"):
            assert squeezed(title) in made.text


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("kind", KINDS)
def test_a_browser_has_nothing_to_complain_of(
    kind: str, pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab
) -> None:
    file, told = pages[kind]
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    for width, scheme in ((360, "dark"), (1400, "light")):
        tab.size(width)
        tab.colors(scheme)
        tab.open(file.as_uri())
        loud = [event for event in tab.events if event.get("method") in WORTH_A_LOOK]
        assert not loud, loud
        asked = [
            event["params"]["request"]["url"]
            for event in tab.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        assert asked == [file.as_uri()]
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        styled = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert styled == {"dark": "rgb(19, 22, 27)", "light": "rgb(255, 255, 255)"}[scheme]
        clipped = tab.evaluate(CLIPPED)
        assert not clipped, clipped
        # innerText is what is drawn, and nothing that is hidden.
        seen = squeezed(tab.evaluate("document.body.innerText"))
        for report in told:
            assert report.verdict.replace("-", "") in seen.replace(" ", "")
            for finding in report.findings:
                assert squeezed(finding.name) in seen


CLIPPED = """[...document.querySelectorAll('svg[role=img] text')].filter(t => {
  const box = t.getBBox(), view = t.ownerSVGElement.viewBox.baseVal;
  return t.getClientRects().length && (box.x < view.x - 1 || box.x + box.width > view.x + view.width + 1
    || box.y < view.y - 1 || box.y + box.height > view.y + view.height + 1);
}).map(t => t.textContent)"""


LOOKED_AT = {
    "hostile": (360, "light", "document"),
    "sick": (1400, "dark", "document"),
    "fixed": (360, "dark", "{include: ['header', 'nav', '#before-after', '#done', '#changed', '#proof', '#undo']}"),
    "gate": (1400, "light", "{include: ['nav', '.report-head', '#models', 'footer']}"),
}
"""What axe-core is shown of a page, which takes seconds: the width, the colors, and the parts of their own kind."""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("kind", LOOKED_AT)
def test_everyone_can_read_it(kind: str, pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab) -> None:
    """The rules of axe-core: names, landmarks, headings, tables, contrast, focus; with everything folded out."""
    import axe_core_python

    rules = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    width, scheme, parts = LOOKED_AT[kind]
    tab.call("Emulation.setScriptExecutionDisabled", value=False)
    tab.size(width)
    tab.colors(scheme)
    tab.open(pages[kind][0].as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(found => { found.open = true })")
    tab.evaluate(f"{rules}; 0")
    found = tab.evaluate(
        f"axe.run({parts}).then(all => ({{passed: all.passes.map(rule => rule.id), violations: "
        "all.violations.map(rule => [rule.id, rule.nodes.slice(0, 3).map(node => node.html)])}))"
    )
    assert not found["violations"], found["violations"]
    assert "color-contrast" in found["passed"]


@pytest.mark.slow
@needs_browser
def test_printed_it_is_folded_out(pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab) -> None:
    tab.size(800)
    tab.colors("dark", "print")
    tab.open(pages["sick"][0].as_uri())
    slots = "[...document.querySelectorAll('details td')].every(cell => cell.getClientRects().length)"
    assert tab.evaluate(slots)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    made = tab.call("Page.printToPDF", printBackground=True)["data"]
    assert base64.b64decode(made).startswith(b"%PDF-")
    tab.colors("light")


def test_the_browser_tests_run_where_main_is_held_to() -> None:
    """`.ci/run` gets a browser, so that the tests above are not skipped there for want of one."""
    assert "chromium" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
