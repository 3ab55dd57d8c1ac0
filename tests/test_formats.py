"""The formats: each valid for its readers, harmless whatever names come, and the same when it is rendered again."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import junitparser
import pytest
from hypothesis import HealthCheck, given, settings
from markdown_it import MarkdownIt
from rich.console import Console
from support.hostile import TEXTS, any_text, hostile_report

from kvdoctor.api import schemas
from kvdoctor.findings import NotChecked, all_checks
from kvdoctor.gating.verdict import GateResult
from kvdoctor.report import formats, markdown, sarif, text
from kvdoctor.report.document import Report
from kvdoctor.report.escaping import code
from kvdoctor.report.escaping import markdown as escaped
from kvdoctor.report.github import in_repository, uri
from kvdoctor.report.wording.summary import format_gate_verdict

SCHEMAS = Path(__file__).parent / "schemas"
SARIF = jsonschema.Draft4Validator(json.loads((SCHEMAS / "sarif-2.1.0.json").read_text(encoding="utf-8")))
GATE = jsonschema.Draft202012Validator(schemas()["gate"])
MARKDOWN = MarkdownIt("gfm-like", {"html": True, "linkify": True})
KNOWN = "add-ma|add-path|debug|echo|endgroup|error|group|notice|remove-ma|save-state|set-|stop-com|warning"
OBEYED = re.compile(rf"^\s*::\s*(?:{KNOWN})[^\n]*::|##[a-z]*\[", re.IGNORECASE | re.MULTILINE)
"""What a runner obeys: the commands that it knows (GitHub's runner, ActionCommandManager); it prints other names."""
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def controls(page: str) -> set[str]:
    """Characters of a page that a terminal or an editor would act on."""
    found = {c for c in page if not (c.isprintable() or c in "\n\u3000")}
    return found | {c for c in page if 0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069}


def healthy() -> Report:
    report = hostile_report("plain")
    return replace(report, verdict="healthy", findings=(), not_checked=(), repair=None, command="gate")


def rendered_gate(reports: list[Report], name: str) -> str:
    """A gate over some reports in a format, with a hostile name among the lines that are said of all models."""
    done = GateResult("unhealthy", tuple(reports), 1)
    last = (format_gate_verdict(done.verdict, reports), f"policy: {reports[0].model.path}")
    return "".join(formats.write_gate(done.to_dict, reports, last, name))


# ---- hostile names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats.FORMATS)
@QUICK
@given(hostile=any_text)
def test_no_name_acts_on_who_reads_it(name: str, hostile: str) -> None:
    report = hostile_report(hostile)
    page = rendered_gate([report, healthy()], name)
    assert not controls(page)
    page.encode("utf-8")
    own = page.splitlines() if name != "github" else [line for line in page.splitlines() if not line.startswith("::")]
    assert not [line for line in own if OBEYED.search(line)]
    assert page == rendered_gate([hostile_report(hostile), healthy()], name)


@pytest.mark.parametrize("length", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in formats.FORMATS if name != "json"])
def test_a_name_of_ten_megabytes_is_shortened(name: str, length: int) -> None:
    report = hostile_report("<|`x\u202e\n" * (length // 6))
    assert len(rendered_gate([report], name)) < 400_000


@QUICK
@given(hostile=any_text)
def test_a_terminal_gets_colors_and_nothing_else(hostile: str) -> None:
    for width, verbosity in ((60, 1), (80, 0), (200, 1)):
        page = StringIO()
        console = Console(file=page, width=width, force_terminal=True, color_system="standard", highlight=False)
        text.print_gate([hostile_report(hostile), healthy()], (hostile,), console, verbosity)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", page.getvalue())
        assert not controls(plain)
        assert not [line for line in plain.splitlines() if OBEYED.search(line)]


@QUICK
@given(hostile=any_text)
def test_json_keeps_every_name_as_it_is(hostile: str) -> None:
    document = json.loads(rendered_gate([hostile_report(hostile)], "json"))
    GATE.validate(document)
    assert document["reports"][0]["findings"][0]["subject"] == [hostile, f"x{hostile}"]


@QUICK
@given(hostile=any_text)
def test_sarif_is_valid(hostile: str) -> None:
    document = json.loads(formats.render(hostile_report(hostile), "sarif"))
    SARIF.validate(document)
    for result in document["runs"][0]["results"]:
        where = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"(?:file://)?(?:[A-Za-z0-9._~/:-]|%[0-9A-F]{2})*", where)


@pytest.fixture(scope="module")
def junit_schema() -> Any:
    import xmlschema  # slow to load

    return xmlschema.XMLSchema(str(SCHEMAS / "junit-10.xsd"))


@QUICK
@given(hostile=any_text)
def test_junit_is_valid(hostile: str, junit_schema: Any) -> None:
    page = formats.render(hostile_report(hostile), "junit")
    junit_schema.validate(page)
    read = junitparser.JUnitXml.fromstring(page.encode("utf-8"))
    assert read.failures >= 1
    assert read.errors >= 1
    assert read.tests == sum(1 for suite in read for _ in suite)


@QUICK
@given(hostile=any_text)
def test_markdown_renders_names_as_text(hostile: str) -> None:
    tokens = MARKDOWN.parse(markdown.render(hostile_report(hostile)))
    inner = [child for token in tokens for child in token.children or ()]
    assert not {"link_open", "image"} & {token.type for token in inner}
    assert {token.content for token in inner if token.type == "html_inline"} <= {"<!-- -->"}
    assert not [token for token in tokens if token.type in ("html_block", "fence", "blockquote_open", "hr")]
    calm = MARKDOWN.parse(markdown.render(hostile_report("x")))
    assert _shape(tokens) == _shape(calm) or not hostile.strip()


def _shape(tokens: list[Any]) -> list[str]:
    return [f"{token.type} {token.level}" for token in tokens if token.type.startswith(("heading", "t", "list_item"))]


@pytest.mark.parametrize("hostile", [one for one in TEXTS if one.strip() and one.isprintable()])
def test_markdown_says_what_the_name_is(hostile: str) -> None:
    (inline,) = [token for token in MARKDOWN.parse(f"x {escaped(hostile)}") if token.type == "inline"]
    said = "".join(token.content for token in inline.children or () if token.type != "html_inline")
    assert said.replace("\\x3a", ":").replace("\\x23", "#") == f"x {hostile}".rstrip()
    (inline,) = [token for token in MARKDOWN.parse(f"x {code(hostile)}") if token.type == "inline"]
    spans = [token.content for token in inline.children or () if token.type == "code_inline"]
    assert [span.replace("\\x3a", ":").replace("\\x23", "#") for span in spans] == [hostile.replace("|", "\u00a6")]


def test_what_github_looks_for_in_rendered_text_is_parted() -> None:
    page = markdown.render(hostile_report("@someone #123 a@b.example"))
    spans_gone = re.sub(r"(`+).+?\1|^    .*$", "", page, flags=re.MULTILINE)
    assert not re.search(r"@\w|#\d", spans_gone)


# ---- the same again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in formats.FORMATS if name != "json"])
def test_the_order_of_arguments_and_measurements_tells_nothing(name: str) -> None:
    report = hostile_report("x")
    one = replace(report, arguments={"fail_on": "error", "seed": 1}, measured={"x": {"seconds": {"a": 1.0}}, "y": {}})
    two = replace(report, arguments={"seed": 1, "fail_on": "error"}, measured={"y": {}, "x": {"seconds": {"a": 1.0}}})
    assert formats.render(one, name) == formats.render(two, name)


# ---- SARIF ---------------------------------------------------------------------------------------------------------


def test_sarif_tells_rules_places_and_how_it_ended() -> None:
    run = json.loads(formats.render(hostile_report("a b#c.onnx"), "sarif"))["runs"][0]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert list(rules) == sorted(rules)
    assert "Repair" in rules["KV203"]["help"]["text"]
    assert "**Repair:**" in rules["KV203"]["help"]["markdown"]
    assert [rules[result["ruleId"]]["id"] for result in run["results"]] == ["KV203", "KV005"]
    for result in run["results"]:
        assert list(rules)[result["ruleIndex"]] == result["ruleId"]
        place = result["locations"][0]
        assert place["physicalLocation"]["artifactLocation"]["uri"] == "a%20b%23c.onnx"
        assert place["physicalLocation"]["region"] == {"startLine": 1}
        assert place["logicalLocations"][0]["fullyQualifiedName"] == "a b#c.onnx/a b#c.onnx"
        assert result["partialFingerprints"]["primaryLocationLineHash"] == "0123456789abcdef:1"
    (invocation,) = run["invocations"]
    assert (invocation["exitCode"], invocation["executionSuccessful"]) == (1, False)
    assert len(invocation["toolExecutionNotifications"]) == 3


@pytest.mark.parametrize(
    ("path", "here", "root", "told"),
    [
        ("marian/a.onnx", "/ws/models", "/ws", "models/marian/a.onnx"),
        ("./a.onnx", "/ws", "/ws/", "a.onnx"),
        ("../exports/a.onnx", "/ws/models", "/ws", "exports/a.onnx"),
        ("/ws/exports/a.onnx", "/elsewhere", "/ws", "exports/a.onnx"),
        ("exports/", "/ws", "/ws", "exports"),
        ("../a.onnx", "/ws", "/ws", "../a.onnx"),
        ("/wsp/a.onnx", "/ws", "/ws", "/wsp/a.onnx"),
        ("a.onnx", "/home", "/ws", "a.onnx"),
        ("a.onnx", "/ws/models", "ws", "a.onnx"),
        ("m/a.onnx", "D:\\a\\repo\\sub", "D:\\a\\repo", "sub/m/a.onnx"),
        ("D:/a/repo/m/a.onnx", "C:\\", "D:\\a\\repo", "m/a.onnx"),
    ],
)
def test_a_path_starts_at_the_root_of_the_repository(path: str, here: str, root: str, told: str) -> None:
    assert in_repository(path, here, root) == told


def test_sarif_and_annotations_name_the_file_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ws" / "models"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "ws")
    monkeypatch.chdir(folder)
    for root, told in (("ws", "models/plain.onnx"), ("link", "models/plain.onnx"), ("other", "plain.onnx")):
        monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / root))
        report = hostile_report("plain.onnx")
        assert formats.render(report, "github").startswith(f"::error file={told},")
        result = json.loads(formats.render(report, "sarif"))["runs"][0]["results"][0]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == told


def test_every_rule_of_sarif_fits_what_github_takes() -> None:
    for check in all_checks():
        rule = sarif._rule(check)
        assert len(rule["name"]) <= 255
        assert len(rule["shortDescription"]["text"]) <= 1024
        assert len(rule["fullDescription"]["text"]) <= 1024
        assert len(rule["properties"]["tags"]) <= 10
        assert len(rule["help"]["text"]) > 200


@pytest.mark.slow
def test_sarif_keeps_to_what_github_takes() -> None:
    """More than 25,000 findings: the worst are kept, and 10 MB compressed are not reached."""
    import gzip

    report = hostile_report("decoder_model_merged")
    error, note = report.findings[0], replace(report.findings[1], severity="note")
    many = [replace(report, findings=(note, error) * 50, not_checked=report.not_checked * 3) for _ in range(300)]
    page = sarif.render_all(many)
    run = json.loads(page)["runs"][0]
    assert len(run["results"]) == 25_000
    assert sum(result["level"] == "error" for result in run["results"]) == 15_000
    told = [notice["message"]["text"] for notice in run["invocations"][0]["toolExecutionNotifications"]]
    assert "5000 more findings are left out: the limit of a run is 25000 results" in told
    assert len(gzip.compress(page.encode())) < 10_000_000


def test_paths_are_references_that_cannot_be_misread() -> None:
    assert uri("models/a b.onnx") == "models/a%20b.onnx"
    assert uri("a:b/c?d#e%f") == "a%3Ab/c%3Fd%23e%25f"
    assert uri("/srv/m.onnx") == "file:///srv/m.onnx"
    assert uri("C:/m.onnx") == "file:///C:/m.onnx"
    assert uri("x\udcff.onnx") == "x%FF.onnx"


# ---- JUnit ---------------------------------------------------------------------------------------------------------


def test_junit_never_makes_green_what_was_not_checked() -> None:
    report = replace(healthy(), not_checked=(NotChecked("plain", "KV301", "why", essential=True),))
    read = junitparser.JUnitXml.fromstring(formats.render(report, "junit").encode())
    errors = {case.name: r.message for suite in read for case in suite for r in case.result if r._tag == "error"}
    assert errors["KV301 cached-differs"] == "why"


def test_junit_shows_no_check_without_a_result_as_passed() -> None:
    """Whatever the report lists as absent: for one stack, or for all of them."""
    absent = (
        NotChecked("plain", "KV309", "one fault", kind="explained"),
        NotChecked(None, "KV320", "asked", kind="not-run"),
    )
    suites = ET.fromstring(formats.render(replace(healthy(), absent=absent), "junit"))  # noqa: S314 - our own
    skipped = {case.get("name"): case.find("skipped") for suite in suites for case in suite}
    for name, reason in (("KV309 chunk-differs", "one fault"), ("KV320 reference-differs", "asked")):
        mark = skipped[name]
        assert mark is not None
        assert mark.get("message") == reason


def test_junit_says_why_a_check_was_skipped() -> None:
    report = replace(healthy(), runs=(), command="step-test")
    cases = [case for suite in ET.fromstring(formats.render(report, "junit")) for case in suite]  # noqa: S314 - our own
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert "KV301 cached-differs" in {case.get("name") for case in skipped}
    assert {case.find("skipped").get("message") for case in skipped} == {"no decode step was run"}  # type: ignore[union-attr]


# ---- GitHub --------------------------------------------------------------------------------------------------------


def test_annotations_are_as_many_as_a_step_may_have() -> None:
    report = hostile_report("x")
    many = replace(report, findings=report.findings[:1] * 40)
    lines = formats.render(many, "github").splitlines()
    errors = [line for line in lines if line.startswith("::error ")]
    assert len(errors) == 10
    assert errors[-1].endswith("::31 more of these; the log of the step lists all of them")


def test_an_annotation_is_one_command() -> None:
    first = formats.render(hostile_report("a,b:c%d\n::error::e"), "github").splitlines()[0]
    kind, properties, *message = first.removeprefix("::").split("::", 1)[0].partition(" ")
    assert kind == "error"
    assert "a%2Cb%3Ac%25d" in message[0]
    assert first.count("\n") == 0
    assert properties == " "


def test_the_summary_is_short_and_the_page_fits_into_an_issue() -> None:
    long = hostile_report("w" * 300)
    report = replace(long, findings=long.findings[:1] * 60)
    many = [replace(report, model=replace(report.model, path=f"models/{n}")) for n in range(60)]
    summary = markdown.render_summary("unhealthy", [*many, healthy()], ("1 of 61 models healthy.",))
    assert len(summary.splitlines()) < 60
    assert "1 of 61 models healthy." in summary
    page = rendered_gate([*many, healthy()], "markdown")
    assert len(page) <= 65_536
    assert page.startswith("## kvdoctor: unhealthy\n")
    assert "reports did not fit" in page


# ---- Markdown and text ---------------------------------------------------------------------------------------------


def test_markdown_fits_into_an_issue() -> None:
    report = hostile_report("w" * 300)
    long = replace(report, findings=tuple(replace(report.findings[0], observed=str(n)) for n in range(200)))
    page = markdown.render(long)
    assert len(page) <= 65_536
    assert "Left out, because the limit is 65536 characters: " in page
    assert page.count("\n## Findings now\n") == 1
    assert len(markdown.render_whole(long)) > 65_536


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_gets_whole_words_and_the_words_of_the_pipe(width: int) -> None:
    report = hostile_report("decoder_model: the past length is fixed at one")
    page = StringIO()
    console = Console(file=page, width=width, force_terminal=True, color_system=None, highlight=False)
    text.print_report(report, console, 1)
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    whole = StringIO()
    text.print_report(report, Console(file=whole, width=4096), 1)
    plain = whole.getvalue()
    assert set(page.getvalue().split()) <= set(re.sub(r"([:,]) ", r"\1 ", plain).split()) | _joined(page.getvalue())
    wrapped = [line for line in lines if line.startswith(("  holds", "  FAILS"))]
    if width == 60:
        after = lines[lines.index(wrapped[0]) + 1]
        assert after.startswith(" " * 9)


def _joined(page: str) -> set[str]:
    """Words of rows that became lines: a comma or a colon was added to them."""
    return {word for word in page.split() if word.endswith((",", ":"))}


def test_a_gate_ends_with_a_table_of_its_models(tmp_path: Path) -> None:
    reports = [healthy(), hostile_report("sick"), healthy()]
    lines = rendered_gate(reports, "text").splitlines()
    rows = [line.split() for line in lines[-7:-3]]
    assert rows[0] == ["model", "verdict", "errors,", "warnings", "time"]
    assert rows[1:] == [["plain", "healthy"], ["sick", "unhealthy", "KV203,", "KV005"], ["plain", "healthy"]]
    assert lines[-2] == "gate: unhealthy; 2 of 3 models healthy, 1 unhealthy \u00b7 exit 1"
    assert sum("cross-cache-emptied" in line for line in lines) >= 1
    assert not list(tmp_path.iterdir())
