"""Advice is kept: the command that a finding prints, run as printed, writes a copy without that finding."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.sampling import thinned
from support.text_fixtures import load_all

from kvdoctor import UsageError, inspect, re_export, step_test
from kvdoctor.cli.main import cli
from kvdoctor.errors import free_name
from kvdoctor.options import ReExportChoices
from kvdoctor.repair.export.pipeline import refuse_impossible
from kvdoctor.repair.session import RepairRequest

ROOT = Path(__file__).parents[2]
EXPORTS = ROOT / "fixtures" / "exports"

TWO_FAULTS = {"present-rewrites-past-rounded"}
"""Two faults in one present: a repair is known for the one alone, and the proof says that it is not enough."""
FAULTY = [
    name
    for name, fixture in load_all().items()
    if not fixture.healthy and not fixture.targets and name not in TWO_FAULTS
]


SCRATCH = ROOT / "fixtures" / "from_scratch"
OWN = [
    f"{folder.name}/{path.name}" for folder in (EXPORTS, SCRATCH) for path in folder.iterdir() if path.suffix != ".md"
]
PRINTED = re.compile(r"^ +(?:fix|or|more|decide|why) +(?:.*: )?(kvdoctor [a-z].*?)(?:   .*)?$", re.MULTILINE)
"""A command on a screen, up to the remark after it."""


@pytest.mark.parametrize("name", thinned([*FAULTY, *sorted(OWN)], 40, 1))
def test_a_printed_command_succeeds(name: str, tmp_path: Path) -> None:
    """Each command of the first screen, as printed; one for a checkpoint says that there is none to run with."""
    model = ROOT / "fixtures" / name if "/" in name else load_all()[name].write(tmp_path / "model")
    code, screen = ask("step-test", str(model))
    found = [f for f in step_test(str(model)).findings if f.severity != "note"]
    advised = [f for f in found if f.repair.kind == "graph" and f.repair.command is not None]
    printed = set(PRINTED.findall(screen)) | {finding.repair.command or "" for finding in advised}
    assert code not in (1,) or printed
    for command in sorted(printed):
        program, *arguments = shlex.split(command.replace(" -o FIXED", f" -o {shlex.quote(str(tmp_path / 'fixed'))}"))
        assert program == "kvdoctor"
        code, text = ask(*arguments, *(("--format", "json") if "re-export" in arguments else ()))
        assert "Traceback" not in text
        assert ("CHECKPOINT is a placeholder" in text) == ("CHECKPOINT" in command), text
        if "re-export" in arguments and "CHECKPOINT" not in command:
            assert (tmp_path / "fixed").is_dir(), text
            left = [finding["name"] for finding in json.loads(text[text.index("{") : text.rindex("}") + 1])["findings"]]
            assert not [finding.name for finding in advised if finding.name in left], text


def ask(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, [*arguments])
    return done.exit_code, f"{done.output}{done.exception or ''}"


def test_a_name_on_the_hub_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OUT stands in the working folder, in which a file of that name would stand too."""
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "google-t5/t5-small"):
        refuse_impossible(RepairRequest(None, "out", False, ReExportChoices(from_=name)), name, offline=True)
    with pytest.raises(UsageError, match="CHECKPOINT is a placeholder"):
        re_export(None, "out", from_="CHECKPOINT")


def test_a_printed_out_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ROOT / "fixtures" / "exports" / "marian-4.46.3"
    assert all(" -o FIXED" in (one.repair.command or " -o FIXED") for one in inspect(model).findings)
    report = re_export(model, "FIXED")
    commands = {one.repair.command for one in report.findings if one.severity != "note"}
    assert commands == {"kvdoctor re-export FIXED --from CHECKPOINT -o FIXED2"}
    assert {one.repair.command.rpartition(" ")[2] for one in inspect(model).findings if one.repair.command} == {
        "FIXED2"
    }
    assert free_name("FIXED", "FIXED2") == "FIXED3"


def test_a_checkpoint_and_a_name_in_place_of_a_model_are_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "model.safetensors").touch()
    code, text = ask("inspect", "gpt")
    assert code == 3
    assert text.count("kvdoctor re-export --from gpt -o EXPORTED") == 1
    for given in ("onnx-community/gpt2", "https://huggingface.co/onnx-community/gpt2/tree/main/onnx"):
        for command in ([given], ["inspect", given]):
            _, text = ask(*command)
            assert "hf download onnx-community/gpt2 --local-dir gpt2" in text
    assert "hf download gpt2 --local-dir gpt2" in ask("inspect", "https://huggingface.co/gpt2")[1]
    assert "curl -LO https://a.example/model.onnx" in ask("inspect", "https://a.example/model.onnx")[1]
    assert "hf download" not in ask("inspect", "gpt/model")[1]


def test_a_frozen_axis_is_answered_with_the_axes_of_that_graph() -> None:
    found = {one.name: one for one in inspect(ROOT / "fixtures" / "from_scratch" / "axes-batch-only.onnx").findings}
    advice = found["past-axis-frozen"].repair
    assert advice.command is None or "--from" not in advice.command  # its author exported it
    written = re.search(r"dynamic_axes=(\{.*\}\})", advice.text)
    assert written is not None
    axes = eval(written[1])  # noqa: S307 - it is meant to be pasted
    assert axes["input_ids"] == {0: "batch", 1: "new"}
    assert axes["past_k_1"] == {0: "batch", 2: "past"}
    assert axes["present_v_1"] == {0: "batch", 2: "total"}
    assert "dynamic_axes" not in found["sequence-axis-frozen"].repair.text  # once is enough
