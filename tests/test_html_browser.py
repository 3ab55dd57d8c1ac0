"""In a browser: nothing is loaded or clipped, everyone can read it, on a telephone, on paper and in a notebook."""

import base64
import http.server
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array, to_array
from support import chromium
from support.pages import assert_sound, assert_tells, kvdoctor, page, reports, squeezed
from support.text_fixtures import compile_text, load_all

from kvdoctor.report.document import Report

EXPORTS = Path("fixtures/exports")
ROOT = Path(__file__).parent.parent
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
@pytest.mark.parametrize(("kind", "most"), [("repro", 5), ("sick", 5), ("layers", 4), ("fixed", 7)])
@pytest.mark.parametrize("paper", [(8.5, 11), (8.27, 11.69)], ids=["letter", "a4"])
def test_printed_it_is_a_few_pages(
    kind: str, most: int, paper: tuple[float, float], pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab
) -> None:
    """Verdict, findings and pictures; `repro` is of the two-layer export of Optimum."""
    tab.size(800)
    tab.open(pages[kind][0].as_uri())
    assert 1 < count_printed(tab, paper) <= most


def count_printed(tab: chromium.Tab, paper: tuple[float, float]) -> int:
    made = tab.call("Page.printToPDF", printBackground=True, paperWidth=paper[0], paperHeight=paper[1])["data"]
    return len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(made)))


@pytest.mark.slow
@needs_browser
def test_printed_it_is_folded_out_where_all_is_asked_for(
    pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab
) -> None:
    tab.size(800)
    tab.colors("dark", "print")
    tab.open(pages["sick"][0].as_uri())
    slots = "[...document.querySelectorAll('details td')].{}(cell => cell.getClientRects().length)"
    shown = "document.body.innerText"
    assert not tab.evaluate(slots.format("some"))
    assert "more than is printed here" in tab.evaluate(shown)
    assert all(finding.cause in tab.evaluate(shown) for finding in pages["sick"][1][0].findings)
    few = count_printed(tab, (8.5, 11))
    tab.evaluate("document.getElementById('print-all').click()")
    assert tab.evaluate(slots.format("every"))
    assert "more than is printed here" not in tab.evaluate(shown)
    assert count_printed(tab, (8.5, 11)) > 2 * few
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.colors("light")


@pytest.mark.slow
@needs_browser
def test_a_telephone_shows_commands_whole(pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab) -> None:
    tab.size(360)
    tab.colors("light")
    for kind in ("sick", "hostile", "fixed", "gate"):
        tab.open(pages[kind][0].as_uri())
        assert tab.evaluate("document.querySelectorAll('.command pre').length")
        assert not tab.evaluate(CUT), kind


CUT = """[...document.querySelectorAll('.command pre, .copy')].filter(
  shown => shown.clientWidth && shown.scrollWidth > shown.clientWidth + 1).map(shown => shown.textContent)"""


@pytest.mark.slow
@needs_browser
def test_one_click_selects_a_command_as_one_line(
    pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab
) -> None:
    tab.size(360)
    tab.open(pages["sick"][0].as_uri())
    box = "document.querySelector('.banner .copy').getBoundingClientRect()"
    left, top, height = tab.evaluate(f"(box => [box.left, box.top, box.height])({box})")
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, x=left + 30, y=top + 5, button="left", clickCount=1)
    assert height > 40  # it stands in several lines
    assert tab.evaluate("getSelection().toString()") == pages["sick"][1][0].findings[0].repair.command


HOST = "<!doctype html><meta charset=utf-8><style>p{color:rgb(1,2,3)}</style><body><p id=cell>x</p>%s</body>"


@pytest.mark.slow
@needs_browser
def test_in_a_notebook_a_link_leads_within_the_page(
    pages: dict[str, tuple[Path, list[Report]]], tab: chromium.Tab, tmp_path: Path
) -> None:
    (report,) = pages["sick"][1]
    (tmp_path / "notebook.html").write_text(HOST % report._repr_html_(), encoding="utf-8")
    asked = []

    class Server(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab.size(1000)
        tab.open(f"http://127.0.0.1:{server.server_port}/notebook.html")
        assert tab.evaluate("getComputedStyle(document.getElementById('cell')).color") == "rgb(1, 2, 3)"
        before = tab.call("Page.captureScreenshot")["data"]
        top = tab.evaluate("document.querySelector('iframe').getBoundingClientRect().top")
        for kind in ("mousePressed", "mouseReleased"):
            # The second link of "On this page".
            tab.call("Input.dispatchMouseEvent", type=kind, x=150, y=top + 62, button="left", clickCount=1)
        deadline = time.monotonic() + 120
        while (after := tab.call("Page.captureScreenshot")["data"]) == before and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        server.shutdown()
    assert after != before
    assert asked.count("/notebook.html") == 1


def test_the_browser_tests_run_where_main_is_held_to() -> None:
    """`.ci/run` gets a browser, so that the tests above are not skipped there for want of one."""
    assert "chromium" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
