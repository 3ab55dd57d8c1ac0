"""Advice is kept: the command that a finding prints, run as printed, writes a copy without that finding."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.sampling import thinned
from support.text_fixtures import load_all

from kvdoctor import step_test
from kvdoctor.cli.main import cli

TWO_FAULTS = {"present-rewrites-past-rounded"}
"""Two faults in one present: a repair is known for the one alone, and the proof says that it is not enough."""
FAULTY = [
    name
    for name, fixture in load_all().items()
    if not fixture.healthy and not fixture.targets and name not in TWO_FAULTS
]


@pytest.mark.parametrize("name", thinned(FAULTY, 40, 2))
def test_a_printed_command_succeeds(name: str, tmp_path: Path) -> None:
    found = [f for f in step_test(str(load_all()[name].write(tmp_path / "model"))).findings if f.severity != "note"]
    advised = [f for f in found if f.repair.kind == "graph" and f.repair.command is not None]
    for command in {finding.repair.command or "" for finding in advised}:
        program, *arguments = shlex.split(command.replace(" -o FIXED", f" -o {shlex.quote(str(tmp_path / 'fixed'))}"))
        assert program == "kvdoctor"
        done = CliRunner().invoke(cli, [*arguments, "--format", "json"])
        assert (tmp_path / "fixed").is_dir(), done.output
        left = [finding["name"] for finding in json.loads(done.stdout)["findings"]]
        assert not [finding.name for finding in advised if finding.name in left], done.output
