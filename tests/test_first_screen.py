"""The first screen: findings first, the picture of the cache, what works, the verdict; at any width, also in ASCII."""

import io
import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from support.hostile import hostile_report
from support.text_fixtures import load_all

from kvdoctor import UsageError
from kvdoctor.decode.runs import quote_error
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.findings import KnownFinding, NotChecked
from kvdoctor.gating.plan import find_models
from kvdoctor.options import Options
from kvdoctor.report import formats, text
from kvdoctor.report.blocks import plain
from kvdoctor.report.document import Report, exit_code
from kvdoctor.report.repair_record import RepairRecord, RepairSide
from kvdoctor.report.sections.cache_lengths import tabulate_lengths
from kvdoctor.report.wording.finding import group_findings, group_open_checks
from kvdoctor.report.wording.health import advise_decision
from kvdoctor.report.wording.runs import format_cache_speedup
from kvdoctor.runtime.client import Runtime

EXPORTS = Path("fixtures/exports")
SCRATCH = Path("fixtures/from_scratch")
FIXTURES = load_all()
WIDTHS = (40, 60, 80, 120, 300)
ASCII = str.maketrans({"✗": "x", "✓": "+", "·": "|", "→": "->", "←": "<-", "…": "..."})


@pytest.fixture(scope="module")
def marian(runtime: Runtime) -> Report:
    return step_test(str(EXPORTS / "marian-4.46.3"), Options(), runtime)


def diagnosed(name: str, folder: Path, runtime: Runtime) -> Report:
    return step_test(str(FIXTURES[name].write(folder)), Options(), runtime)


def screen(report: Report, width: int = 80, verbosity: int = 0) -> list[str]:
    page = io.StringIO()
    console = Console(file=page, width=width, force_terminal=True, color_system=None, highlight=False)
    text.print_report(report, console, verbosity)
    return page.getvalue().splitlines()


def test_the_finding_is_first_the_verdict_last_and_all_of_it_on_one_screen(marian: Report) -> None:
    lines = screen(marian)
    assert len(lines) <= 40
    assert lines[:2] == ["kvdoctor step-test fixtures/exports/marian-4.46.3", ""]
    assert re.fullmatch(r"✗ error\[KV203\] cross-cache-emptied +decoder_model_merged.onnx", lines[2])
    cause = next(line for line in lines if line.startswith("  cause "))
    assert 'If "optimum::if", cached branch' in cause
    fix = next(line for line in lines if line.startswith("  fix "))
    assert fix.split(maxsplit=1)[1] == "kvdoctor re-export fixtures/exports/marian-4.46.3 -o FIXED"
    assert any(line.startswith("  or ") for line in lines)
    whole = " ".join(" ".join(lines).split())
    assert re.search(r"unhealthy: 1 error, 2 warnings, 2 notes · \S+ s · exit 1", whole)
    assert lines[-1].endswith("details: -v")
    explained = "the plain loop failed at step 2, so its later logits were not compared"
    assert explained not in whole
    assert f"explained by a finding: KV301 (merged): {explained}" in " ".join(" ".join(screen(marian, 80, 1)).split())
    assert "if you feed several tokens on a cache, or pad the encoder rows of a batch, or begin a second turn" in whole


def test_what_a_healthy_verdict_does_not_need_is_said_to_be_that(runtime: Runtime) -> None:
    report = step_test(str(SCRATCH / "axes-past-only.onnx"), Options(), runtime)
    assert report.verdict == "healthy"
    first, whole = (" ".join(" ".join(screen(report, verbosity=verbosity)).split()) for verbosity in (0, 1))
    assert "no call without a cache exists to compare with: the same logits when run again, in " in first
    assert "not checked" not in first
    assert "not checked, and not needed for the verdict: KV301 (axes-past-only): logits parity" in whole


def test_a_reason_is_wrapped_and_not_cut(runtime: Runtime) -> None:
    report = step_test(str(SCRATCH / "axes-past-only.onnx"), Options(), runtime)
    reason = "a reason that needs several lines of a terminal " * 6 + "and has an end"
    runs = tuple(replace(r, reason=reason) if r.experiment == "left-padding" else r for r in report.runs)
    whole = " ".join(" ".join(screen(replace(report, runs=runs))).split())
    assert f"left-padding ({reason})" in whole


def test_a_message_of_the_runtime_is_quoted_by_its_end(runtime: Runtime) -> None:
    report = step_test(str(SCRATCH / "mask-square.onnx"), Options(), runtime)
    whole = " ".join(" ".join(screen(report)).split())
    assert 'observed chunk, step 1: "' in whole
    assert "by a dimension other than 1. 3 by 8" in whole
    assert "Non-zero status code" not in whole
    assert "Non-zero status code" in " ".join(screen(report, verbosity=2))


def test_the_picture_shows_the_step_at_which_the_cache_goes_wrong(marian: Report) -> None:
    stack = marian.stacks[0]
    run = next(run for run in marian.runs if (run.stack, run.experiment) == ("merged", "plain-loop"))
    assert stack.contract is not None
    table = tabulate_lengths(run, stack.contract)
    assert table is not None
    assert table.header == ("step", "self-attention", "cross-attention", "logits")
    assert [[*map(plain, row[:3])] for row in table.rows] == [
        ["0", "0 → 3", "0 → 7"],
        ["1", "3 → 4", "7 → 0 empty, null pointer ← here"],
        ["2", "4 → ✗", "0 → ✗"],
    ]
    assert table.rows[2][3] == 'fails in Reshape "/model/decoder/layers.0/encoder_attn/Reshape_4"'
    assert "\n".join(screen(marian)).count("← here") == 1


def test_wrong_logits_are_marked_where_the_lengths_are_right(tmp_path: Path, runtime: Runtime) -> None:
    lines = screen(diagnosed("past-ignored", tmp_path, runtime))
    (here,) = (line for line in lines if line.endswith("← here"))
    assert re.fullmatch(r" +1 +3 → 4 +off by \d\S* SD ← here", here)


def test_the_steps_of_a_run_that_a_finding_quotes_are_the_ones_shown(tmp_path: Path, runtime: Runtime) -> None:
    """Several runs fail here, each at a step of its own number."""
    for name in ("present-does-not-grow-cut", "step-fails-long"):
        report = diagnosed(name, tmp_path / name, runtime)
        quoted = next(finding for finding in report.findings if finding.severity == "error").observed
        run, step = re.match(r"([a-z-]+), step (\d+)", quoted).groups()
        shown = next(one for one in report.runs if one.experiment == run)
        (here,) = (line for line in screen(report) if line.endswith("← here"))
        assert int(here.split()[0]) == shown.failed_step
        assert int(step) == shown.failed_step - (name == "present-does-not-grow-cut")


def test_workarounds_have_a_table_of_their_own_and_stand_on_no_first_screen(marian: Report) -> None:
    assert not [line for line in screen(marian) if "all-ids-with-cache" in line]
    lines = screen(marian, 200, 1)
    title = next(n for n, line in enumerate(lines) if line.startswith("merged: workarounds that are often tried"))
    rows = [line.split()[0] for line in lines[title + 2 : title + 7]]
    assert rows == ["dummy-past", "cached-branch-first", "same-cache", "all-ids-with-cache", "late-cache"]


def test_alike_findings_are_one_and_verbose_has_the_evidence_of_each(marian: Report) -> None:
    warnings = [finding for finding in marian.findings if finding.severity == "warning"]
    assert [finding.stack for finding in warnings] == ["merged", "pair"]
    (group,) = group_findings(warnings)
    assert group.places == ("merged", "pair")
    assert "\n".join(screen(marian)).count("KV315") == 1
    shown = "\n".join(screen(marian, 300, 1))
    assert shown.count("warning[KV315]") == 1
    for finding in marian.findings:
        for part in (finding.where, finding.declared, finding.observed, *finding.evidence, *finding.effects):
            assert part in shown
    assert len(group_findings([warnings[0], replace(warnings[1], observed="another")])) == 2


def test_what_was_not_checked_for_one_reason_is_one_line() -> None:
    entries = [NotChecked("a", "KV202", "why"), NotChecked("b", "KV301", "why"), NotChecked(None, "*", "all", True)]
    groups = group_open_checks(entries)
    assert [(group.title, group.reason) for group in groups] == [("everything", "all"), ("KV202, KV301 (a, b)", "why")]


def test_a_healthy_model_is_told_what_works_how_closely_and_that_the_check_could_have_failed(
    tmp_path: Path, runtime: Runtime
) -> None:
    report = diagnosed("decoder-only-healthy", tmp_path, runtime)
    lines = screen(report, 300)
    uses = "one token a step (cache lengths 0 to 127), several at once (2, 3, 7), batch (2, 3, 9)"
    more = "beams, left padding, rollback, second chat turn"
    assert lines[2] == f"✓ decoder works: {uses}, a prompt of one token, {more}"
    close = r"largest difference \d\.\de-\d\d of the logits' standard deviation; control: a corrupted cache gives \S*"
    assert re.fullmatch(rf"  agrees with a run without a cache \({close}\)", lines[3])
    for other in (formats.render(report, "markdown"), formats.render(report, "html")):
        assert uses in other.replace("\\", "")
    lengths = "agree for every past, chunk and batch up to 128 tokens (rows of w_positions)"
    proved = f"with and without a cache {lengths}, if no attention score is below the mask value (such as -10,000)"
    assert lines[4] == f"  proved: {proved}"
    assert lines[5].startswith("  not tried: ")
    assert "--thorough" in lines[5]
    assert re.match(r"healthy · (\d+) of \1 uses work · .* · exit 0 ", lines[-1])


def test_steps_that_rounding_moves_are_not_said_to_agree(tmp_path: Path, runtime: Runtime) -> None:
    lines = screen(diagnosed("cached-differs-rounded-dynamic", tmp_path, runtime), 300)
    assert not [line for line in lines if "agrees" in line]
    (told,) = [line for line in lines if "by rounding alone" in line]
    assert re.search(r"differs by rounding alone from a run without a cache \(.*, \S+ in a float32 copy", told)


def test_states_that_no_mask_reaches_are_not_tried_with_padding(tmp_path: Path, runtime: Runtime) -> None:
    report = diagnosed("layout-hybrid-recurrent-healthy", tmp_path, runtime)
    why = "attention_mask does not reach the state 'past_key_values.0.conv_state': padding would enter it"
    assert f"not tried: left-padding ({why})" in "\n".join(screen(report, 300))
    assert why in formats.render(report, "markdown").replace("\\", "")


@pytest.mark.parametrize(("context", "tried"), [(64, True), (2_000_000, False)])
def test_a_context_that_longer_runs_do_not_reach_is_named(
    context: int, tried: bool, tmp_path: Path, runtime: Runtime
) -> None:
    folder = shutil.copytree(EXPORTS / "llama-gqa", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}), encoding="utf-8")
    lines = screen(step_test(str(folder), Options(thorough=True), runtime), 300)
    (line,) = [line for line in lines if line.startswith("  not tried: ")]
    assert ("full-context (2000000 tokens are declared, whose cache takes too much memory" in line) is not tried
    assert "--thorough" not in line


def test_what_is_undecided_is_no_pass_and_says_what_decides(tmp_path: Path, runtime: Runtime) -> None:
    lines = screen(diagnosed("layout-aihub-trocr-healthy", tmp_path, runtime), 300)
    at = lines.index("? incomplete, not a pass")
    assert lines[at + 1].split()[0] == "why"
    assert lines[at + 2].split()[:3] == ["decide", "no", "command:"]
    assert "exit 3" in lines[-1]
    assert "healthy ·" not in lines[-1]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_but_a_command_is_wider_than_the_terminal(width: int, marian: Report) -> None:
    commands = 0
    for report, verbosity in (*((marian, verbosity) for verbosity in (-1, 0, 1, 2)), (hostile_report("w" * 5000), 0)):
        for label, line in pairwise(screen(report, width, verbosity)):
            if len(line) > width:
                assert (label, line[:4].strip()) in (("  fix", ""), ("  or", "")), line
                commands += report is marian
    assert commands or width > 60  # one that is copied in two pieces is none


def test_three_hundred_findings_are_one_screen_and_a_count() -> None:
    report = hostile_report("decoder")
    many = [replace(report.findings[0], code=f"KV{n}", observed=str(n)) for n in range(300, 600)]
    open_checks = tuple(NotChecked(None, "KV301", f"reason {n}") for n in range(300))
    lines = screen(replace(report, findings=tuple(many), not_checked=open_checks, notes=("note",) * 300))
    assert len(lines) <= 60, "two cards, a repair, three reasons and notes"
    whole = " ".join(" ".join(lines).split())
    assert re.search(r"\.\.\. \d+ more findings: error\[KV\d+\]", whole)
    assert "297 more not checked (-v)" in whole
    assert "300 errors" in whole


@pytest.mark.parametrize("verbosity", [0, 1])
def test_ascii_has_the_same_content(verbosity: int, marian: Report) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", newline=""), width=4096, color_system=None)
    text.print_report(marian, console, verbosity)
    console.file.flush()
    page = io.StringIO()
    text.print_report(marian, Console(file=page, width=4096, color_system=None), verbosity)

    def words(shown: str) -> list[str]:
        return shown.translate(ASCII).split()

    assert words(raw.getvalue().decode("ascii")) == words(page.getvalue())


def test_a_dry_run_has_the_exit_code_of_the_original() -> None:
    report = replace(hostile_report("x"), findings=(), not_checked=(), notes=())
    after = RepairSide("healthy", ())
    planned = RepairRecord("x", None, (), RepairSide("unhealthy", hostile_report("x").findings), after, (), proved=True)
    dry = replace(report, verdict="unhealthy", repair=planned)
    assert (exit_code(dry, "error"), exit_code(dry, "never")) == (1, 0)
    assert exit_code(replace(report, verdict="healthy", repair=replace(planned, out="OUT")), "error") == 0
    last = " ".join(screen(dry, 300)[-1].split())
    assert last.startswith(
        "dry run: the original stays unhealthy (1 error, 1 warning); the repaired copy would be healthy"
    )


def test_known_findings_leave_a_model_healthy_in_words(marian: Report) -> None:
    known = tuple(replace(finding, known=KnownFinding("our loop holds it")) for finding in marian.findings)
    report = replace(marian, verdict="healthy", findings=known)
    assert screen(report, 300)[-1].startswith("healthy but for known findings: ")
    assert any(
        line.startswith("· known: error[KV203] cross-cache-emptied (merged): our loop") for line in screen(report)
    )


def test_an_output_that_is_not_compared_is_named(tmp_path: Path, runtime: Runtime) -> None:
    lines = screen(diagnosed("readings-two-heads-healthy", tmp_path, runtime), 300)
    assert any("not tried: " in line and "output second (--logits-output second)" in line for line in lines)


def test_the_end_of_a_message_is_quoted() -> None:
    long = "[ONNXRuntimeError] : 1 : FAIL : /src/x.h:45 f(int) i < n was false. Attempting to broadcast an axis. 4 by 5"
    assert quote_error(long) == "Attempting to broadcast an axis. 4 by 5"
    assert len(quote_error("x" * 5000)) <= 150


def test_a_cache_that_does_not_pay_is_no_speed_up() -> None:
    slower = {"cached:5": 0.002, "uncached:5": 0.001, "cached:50": 0.001, "uncached:50": 0.002}
    shown = format_cache_speedup(slower)
    assert shown == "cache speed-up: none at 5 tokens (1.00 ms -> 2.00 ms), 2.0x at 50 tokens (2.00 ms -> 1.00 ms)"


# ---- the models that a gate finds --------------------------------------------------------------------------------


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in ("a/model.onnx", "b/c/model.onnx", "b/c/onnx/model_q4.onnx", "d/onnx/model.onnx", ".git/x.onnx"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["."], ["a", "b/c", "d"]),
        (["b"], ["b/c"]),
        (["b/c", "d"], ["b/c", "d"]),
        (["?"], ["a", "b/c", "d"]),
        (["*/*.onnx"], ["a/model.onnx"]),
        (["**"], ["a", "b/c", "b/c/onnx", "d/onnx"]),
        (["a", "a/model.onnx", "a"], ["a", "a/model.onnx"]),
        (["empty"], ["empty"]),
        (["missing"], ["missing"]),
    ],
)
@pytest.mark.usefixtures("exports")
def test_a_gate_finds_the_exports_below_a_folder_and_expands_patterns(given: list[str], found: list[str]) -> None:
    assert list(find_models(given)) == found


@pytest.mark.usefixtures("exports")
def test_a_pattern_may_lead_out_of_the_folder_and_one_without_a_match_is_refused(
    exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(find_models([f"{exports.as_posix()}/b/*"])) == [f"{exports.as_posix()}/b/c"]
    monkeypatch.chdir(exports / "a")
    assert list(find_models(["../b/*"])) == ["../b/c"]
    with pytest.raises(UsageError, match=r"matches no folder and no \.onnx file"):
        find_models(["nothing*"])


def test_a_gate_finds_what_stands_beside_a_model_and_behind_links(tmp_path: Path) -> None:
    for name in ("mix/old.onnx", "mix/00/model.onnx", "mix/onnx/model.onnx", "elsewhere/model.onnx"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "mix" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "mix" / "back").symlink_to(tmp_path / "mix")
    top = (tmp_path / "mix").as_posix()
    assert list(find_models([top])) == [top, f"{top}/00", f"{top}/linked"]


@pytest.mark.parametrize(
    ("code", "arguments", "advice"),
    [
        ("KV404", {"target": ["onnxruntime==1.16.3"]}, "--target onnxruntime==1.16.3   (do what the reason names"),
        ("KV404", {"target": ["onnxruntime==1.16.3"], "offline": True}, "==1.16.3   (once without --offline"),
        ("KV320", {"reference": "gpt2", "offline": True}, "--reference gpt2   (once without --offline"),
        ("KV320", {"reference": "gpt2"}, "--reference gpt2   (fix the checkpoint"),
    ],
)
def test_what_could_not_be_fetched_is_named(code: str, arguments: dict[str, object], advice: str) -> None:
    report = inspect(str(EXPORTS / "gpt2"))
    missing = (NotChecked("decoder", code, "it is not there", essential=True),)
    report = replace(report, command="step-test", arguments=report.arguments | arguments, not_checked=missing)
    assert advice in plain(advise_decision(report))


def test_a_folder_without_models_is_not_to_be_inspected(tmp_path: Path) -> None:
    assert advise_decision(inspect(str(tmp_path))) == "give the folder of an export, or an .onnx file"
