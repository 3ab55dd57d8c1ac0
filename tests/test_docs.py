"""What README and docs say is true today; what they show is played in tests/test_docs_played.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvdoctor.api import schemas
from kvdoctor.cli.main import cli
from kvdoctor.findings import all_checks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "docs"))


def run(arguments: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvdoctor", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = next(line for line in README.splitlines() if "-m pytest -n 2" in line and line.startswith("python3"))
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_page_of_checks_is_current() -> None:
    import make_checks

    assert (ROOT / "docs" / "checks.md").read_text(encoding="utf-8") == make_checks.page()


def test_the_page_of_experiments_is_current() -> None:
    import make_experiments

    assert (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8") == make_experiments.page()


def test_each_conversion_is_proved_on_six_models() -> None:
    import make_conversions

    tables = make_conversions.read_tables()
    assert set(tables) == set(make_conversions.MODELS)
    for conversion in make_conversions.CONVERSIONS:
        assert [row[conversion] for row in tables.values()].count("proved") >= 6, conversion
    page = make_conversions.PAGE.read_text(encoding="utf-8").partition(make_conversions.BEGIN)[2]
    reasons = re.findall(r"^(\d+)\. ", page, re.MULTILINE)
    assert {f"({number})" for number in reasons} == {c for row in tables.values() for c in row.values()} - {"proved"}


def test_the_figures_of_the_readme_are_those_of_the_tables() -> None:
    zoo, faults = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("zoo.md", "faults.md"))
    rows = re.findall(r"^\| \w+ \| ([\w.-]+) \| [\w-]+ \| [\w-]+[^|]*\| \d", zoo, re.MULTILINE)
    injected = re.search(
        r"^(\d+) faults in (\d+) broken exports: (\d+) found, .*\(([\d.]+) in 100\)", faults, re.MULTILINE
    )
    assert injected is not None
    plain = " ".join(README.split())
    assert f"{len(rows)} exports of {len(set(rows))} architectures" in plain
    kinds, exports, found, named = injected.groups()
    assert f"{kinds} faults, injected into {exports} exports: {found} found, {named} in 100 by their own name" in plain


def test_every_check_is_explained() -> None:
    for check in all_checks():
        text = CliRunner().invoke(cli, ["explain", check.name]).output
        for part in ("What it means:", "Reproduce:", "Repair:"):
            assert part in text, check.name
        assert CliRunner().invoke(cli, ["explain", check.code.lower()]).output == text
    assert run(["explain", check.name]).stdout == text


def test_each_check_has_a_meaning_of_its_own() -> None:
    """Also where one module defines several: nobody asks about NaN to read what a wrong past is."""
    meanings = [check.documentation.partition("What it means:")[2].partition("\n\n")[0] for check in all_checks()]
    assert all(len(text) > 60 for text in meanings)
    assert len(set(meanings)) == len(meanings)


def test_an_unknown_check_is_answered_with_the_nearest() -> None:
    done = run(["explain", "cross-cache-emtied"])
    assert done.returncode == 2
    assert "cross-cache-emptied" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["inspect"],
        ["step-test"],
        ["re-export"],
        ["repro"],
        ["gate"],
        ["explain"],
        ["env"],
        ["contract"],
        ["schema"],
    ],
)
def test_help_works(command: list[str]) -> None:
    done = run([*command, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout


def test_env_names_what_is_here() -> None:
    done = run(["env"])
    assert done.returncode == 0
    for word in ("onnxruntime", "CPUExecutionProvider", "kvdoctor"):
        assert word in done.stdout


def test_what_the_page_on_reproducers_shows_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "repro.md").read_text(encoding="utf-8")
    (name, shown), *_ = re.findall(r"<!-- played: (.+?) -->\n```text\n(.+?)```", page, re.DOTALL)
    assert run(["repro", f"fixtures/exports/{name}", "-o", str(tmp_path / "out")]).returncode == 1
    program = [sys.executable, str(tmp_path / "out" / "reproduce.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert shown.strip() in done.stdout


@pytest.mark.parametrize(("page", "heading"), [("commands.md", "## schema"), ("formats.md", "## json")])
def test_pages_name_every_schema(page: str, heading: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for name in schemas():
        assert re.search(rf"`(kvdoctor schema )?{name}`", prose), f"{page} does not name the schema {name}"
