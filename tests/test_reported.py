"""Public reports, rebuilt small: the command of the reporter names the cause, and its healthy sibling stays silent."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command_line import run
from support.sampling import sampled
from support.text_fixtures import load_all

FIXTURES = load_all()


@dataclass(frozen=True)
class Reported:
    """An issue, the text fixture with its fault, and parts of what `step-test` must print, of the fix among them."""

    issue: str
    fixture: str
    said: tuple[str, ...]
    repaired: bool = False


REPORTS = (
    Reported("huggingface/transformers#33129", "keys-change-with-length", ("from 21 tokens on", "empty the cache")),
    Reported("microsoft/onnxscript#2561", "non-finite-half-mask", ("KV304", "not finite")),
    Reported(
        "mosaicml/examples#257",
        "padding-changes-logits-slice",
        ("count the padding of a step's own tokens alone", "the prefill is right"),
        repaired=True,
    ),
    Reported("pytorch/pytorch#80271", "present-does-not-grow-copied", ("without its new tokens",), repaired=True),
    Reported("microsoft/onnxruntime-genai#1995", "axis-name-collision-output", ("KV113",), repaired=True),
    Reported("ROCm/hip-ep#666", "axis-name-collision-stale", ("KV113",), repaired=True),
    Reported(
        "ysdede/parakeet.js#11",
        "loop-breaks-contract-blank",
        ("taken over after step", "feed its states and its token"),
    ),
    Reported(
        "microsoft/onnxruntime-genai#1682", "loop-breaks-contract-hole", ("hides token 3 (id 2)", "is not padding")
    ),
    Reported(
        "DakeQQ/Native-LLM-for-Android#33",
        "loop-breaks-contract-switch",
        ("attention_mask is fed 0, where 1 is right", "feed attention_mask 1 on the first step"),
    ),
    Reported("tenstorrent/tt-metal#54413", "wrong-at-lengths-zeros", ("left at zero", "entries 20 to 23")),
)


def _ask(name: str, folder: Path) -> tuple[int, str]:
    """The first screen that a reporter sees, with the recorded loop where the report is about one."""
    fixture = FIXTURES[name]
    model = fixture.write(folder / name)
    trace = ("--trace", str(model / fixture.trace)) if fixture.trace is not None else ()
    done = run("step-test", str(model), *trace)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("report", sampled(REPORTS, 3), ids=lambda one: one.issue)
def test_the_reporters_command(report: Reported, tmp_path: Path) -> None:
    fixture = FIXTURES[report.fixture]
    code, screen = _ask(report.fixture, tmp_path)
    assert code == int(any(expected.severity == "error" for expected in fixture.expect))
    missing = [part for part in report.said if part not in " ".join(screen.split())]
    assert not missing, screen
    code, screen = _ask(fixture.twin or "", tmp_path)
    assert (code, screen.count("warning["), screen.count("error[")) == (0, 0, 0), screen
    if report.repaired:
        model, out = tmp_path / report.fixture, tmp_path / "fixed"
        done = run(*shlex.split(f"re-export {shlex.quote(str(model))} -o {shlex.quote(str(out))}"))
        assert (done.returncode, out.is_dir()) == (0, True), done.stdout
        again = run("step-test", str(out))
        assert "healthy" in again.stdout.splitlines()[-1], again.stdout
