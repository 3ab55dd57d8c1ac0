"""`--fail-on` by severity and certainty: a suspected finding fails only where it is asked to, in all commands alike."""

from pathlib import Path

import pytest
from support import text_fixtures
from support.isolated import kvdoctor

from kvdoctor import inspect
from kvdoctor.choices import FAIL_ON
from kvdoctor.comparison.findings_diff import compare_findings
from kvdoctor.findings import SEVERITIES, Finding, reaches
from kvdoctor.report.document import exit_code

FAILS_ON = {"suspected": {"error:suspected", "warning", "warning:suspected", "note", "note:suspected"}}
"""The values that make the exit code 1 for a suspected warning."""


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which an inspection suspects one warning and finds nothing else."""
    folder = tmp_path_factory.mktemp("doubtful")
    text_fixtures.read(text_fixtures.FOLDER / "mask-not-offset.onnxtxt").write(folder)
    (found,) = inspect(str(folder)).findings
    assert (found.severity, found.confidence) == ("warning", "suspected")
    return folder


@pytest.fixture(scope="module")
def suspicion(doubtful: Path) -> Finding:
    return inspect(str(doubtful)).findings[0]


@pytest.mark.parametrize("fail_on", FAIL_ON)
def test_a_suspected_warning_counts_where_it_is_asked_to(fail_on: str, suspicion: Finding, doubtful: Path) -> None:
    expected = fail_on in FAILS_ON["suspected"]
    assert reaches(suspicion, fail_on) == expected
    report = inspect(str(doubtful), fail_on=fail_on)
    assert exit_code(report, fail_on) == int(expected)
    assert (suspicion.name in str(report)) == expected


def test_certainty_changes_nothing_for_what_is_confirmed(suspicion: Finding) -> None:
    from dataclasses import replace

    for severity in SEVERITIES:
        finding = replace(suspicion, severity=severity, confidence="confirmed")
        for lowest in SEVERITIES:
            plain = reaches(finding, lowest)
            assert plain == reaches(finding, f"{lowest}:confirmed") == reaches(finding, f"{lowest}:suspected")


def test_inspect_gate_and_diff_agree(doubtful: Path, suspicion: Finding) -> None:
    for fail_on, code in (("error:suspected", 1), ("warning:confirmed", 0)):
        given = ("--fail-on", fail_on)
        assert kvdoctor("inspect", doubtful, *given).returncode == code
        assert kvdoctor("gate", doubtful, "--static", *given).returncode == code
        (new,) = compare_findings([], [suspicion], {}, fail_on)
        assert (new.effect == "worse") == (code == 1)


def test_a_policy_takes_the_same_words(doubtful: Path, tmp_path: Path) -> None:
    policy = tmp_path / "kvdoctor.toml"
    policy.write_text('fail-on = "error:suspected"\n')
    assert kvdoctor("inspect", doubtful, "--config", policy).returncode == 1
    policy.write_text('fail-on = "never:suspected"\n')
    done = kvdoctor("inspect", doubtful, "--config", policy)
    assert done.returncode == 2
    assert ":suspected" in done.stderr
