"""What README and docs say is true today, and what they show is what is printed."""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner
from support import command_line
from support.command_line import Done
from support.isolated import give_up

from kvdoctor import contract
from kvdoctor.api import schemas
from kvdoctor.choices import FAIL_ON
from kvdoctor.cli.main import cli, find_command, list_commands
from kvdoctor.findings import all_checks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(arguments: list[str], cwd: Path = ROOT) -> Done:
    return command_line.run(*arguments, cwd=cwd)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = next(line for line in README.splitlines() if "-m pytest -n 2" in line and line.startswith("python3"))
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_pages_are_short_enough_to_be_read() -> None:
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert sum(len(page.split()) for page in pages) <= 50_000


def test_a_page_for_a_reader_has_five_links() -> None:
    readers = sorted((ROOT / "docs").glob("for-*.md"))
    assert len(readers) == 5
    for page in readers:
        links = re.findall(r"^- \[[^]]+\]\(([a-z-]+\.md)\): ", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(set(links)) == 5, page.name
        assert all((ROOT / "docs" / link).exists() for link in links)


def test_the_page_of_checks_is_current() -> None:
    import make_checks

    assert (ROOT / "docs" / "checks.md").read_text(encoding="utf-8") == make_checks.page()


def test_the_page_of_repairs_is_current() -> None:
    import make_repairs

    assert (ROOT / "docs" / "repairs.md").read_text(encoding="utf-8") == make_repairs.page()


def test_the_page_of_experiments_is_current() -> None:
    import make_experiments

    assert (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8") == make_experiments.page()


def test_the_figures_of_the_readme_are_those_of_the_tables() -> None:
    zoo, faults = ((ROOT / "evidence" / name).read_text(encoding="utf-8") for name in ("zoo.md", "faults.md"))
    rows = re.findall(r"^\| \w+ \| ([\w.-]+) \| [\w-]+ \| [\w-]+[^|]*\| \d", zoo, re.MULTILINE)
    injected = re.search(
        r"^(\d+) faults in (\d+) broken exports: (\d+) found, .*\(([\d.]+) in 100\)", faults, re.MULTILINE
    )
    assert injected is not None
    plain = " ".join(README.split())
    assert f"{len(rows)} exports of {len(set(rows))} architectures and forms" in plain
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


DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import make_consoles  # noqa: E402 - found by the line above

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ALL = (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted(DOCS.glob("*.md")))
QUOTED = re.compile(r"`(kvdoctor [a-z][^`\n]*)`")
TYPED = re.compile(r"^(?:\$ |- |\s+- )?(?:\.venv/bin/)?(kvdoctor [a-z].*)$", re.MULTILINE)


def cost(page: Path) -> list[pytest.MarkDecorator]:
    """The README is played by the quick tests; of the other pages those that run no model."""
    slow = page.name != "README.md" and make_consoles.runs_a_model(page.read_text(encoding="utf-8"))
    return [pytest.mark.slow] if slow else []


@pytest.mark.parametrize("page", [pytest.param(page, marks=cost(page), id=page.name) for page in make_consoles.pages()])
def test_what_is_shown_is_what_is_printed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    today = make_consoles.played(text)
    assert make_consoles.comparable(text) == make_consoles.comparable(today)


def named(page: str) -> list[str]:
    """The calls of kvdoctor in code: whole lines of blocks, and words in the text."""
    blocks = (block.replace("\\\n", " ") for _, block in FENCE.findall(page))
    lines = [line for block in blocks for line in TYPED.findall(block)]
    return lines + QUOTED.findall(FENCE.sub("", page))


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_command_and_option_that_is_named_exists(page: Path) -> None:
    for line in named(page.read_text(encoding="utf-8")):
        parts = shlex.shlex(line.replace("\\|", "|"), posix=True, punctuation_chars="|;&>")
        parts.whitespace_split = True  # a comment ends a line, as in a shell
        words = list(itertools.takewhile(lambda word: word[0] not in "|;&>", filter(None, parts)))[1:]
        if len(words) == 1 and words[0].isupper():
            continue  # `kvdoctor COMMAND`, a word for any of them
        command = find_command("step-test" if "/" in words[0] else words[0])  # a path alone is a step-test
        assert command is not None, f"{page.name}: {line}"
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        asked = {word.partition("=")[0] for word in words[1:] if word.startswith("-") and word != "--"}
        assert asked <= known | {"--help"}, f"{page.name}: {line}"


def test_the_readmes_have_the_same_commands() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    assert FENCE.findall(make_consoles.comparable(chinese)) == FENCE.findall(make_consoles.comparable(english))
    links = re.compile(r"\]\((?!README)([^)]+)\)")
    assert sorted(links.findall(chinese)) == sorted(links.findall(english))
    assert len(re.findall(r"^#+ ", chinese, re.MULTILINE)) == len(re.findall(r"^#+ ", english, re.MULTILINE))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "README.zh-CN.md"], ids=lambda page: page.name)
def test_the_readme_links_to_what_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        picture = target.startswith("docs/images/") and not (DOCS / "images").exists()
        assert target.startswith("https://") or picture or (ROOT / target).exists(), target


def test_the_page_of_the_contract_has_every_word_of_it() -> None:
    page = (DOCS / "contract.md").read_text(encoding="utf-8")
    words = {word for kind in (contract.Growth, contract.Carry, contract.First) for word in typing.get_args(kind)}
    assert not [word for word in words if f"| `{word}` |" not in page]


@pytest.mark.parametrize("name", sorted(list_commands()))
def test_help_has_an_example_that_is_a_call_of_the_command(name: str) -> None:
    command = find_command(name)
    assert command is not None
    examples = [line.strip() for line in (command.epilog or "").splitlines() if "kvdoctor " in line]
    assert examples
    for line in examples:
        words = shlex.split(line.partition("  ")[0])
        assert words[:2] == ["kvdoctor", name]
        command.make_context(name, words[2:], resilient_parsing=False)


@pytest.mark.slow
def test_the_pages_are_built_without_a_warning_and_ask_nothing_of_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {page.relative_to(tmp_path).with_suffix(".md").as_posix() for page in tmp_path.rglob("*.html")}
    assert {page.name for page in DOCS.glob("*.md")} <= built
    fetched = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]+\"")
    imported = re.compile(r"(?:@import|url\()\s*['\"]?(?:https?:)?//")
    for file in (*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")):
        text = file.read_text(encoding="utf-8")
        assert not fetched.search(text), f"{file.name}: {fetched.search(text)}"
        assert not imported.search(text), file.name


COMPLETED = r"""
eval "$(_KVDOCTOR_COMPLETE=bash_source kvdoctor)"
COMP_WORDS=({words}) COMP_CWORD={at}
$(complete -p kvdoctor | sed 's/.*-F \([^ ]*\).*/\1/') kvdoctor
printf '%s\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "at", "answers"),
    [
        ("kvdoctor ste", 1, {"step-test"}),
        ("kvdoctor gate --fail-on ''", 3, {*FAIL_ON}),
        ("kvdoctor step-test --cons", 2, {"--consumer"}),
    ],
)
def test_bash_completes(words: str, at: int, answers: set[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        give_up("bash is not on the path")
    program = tmp_path / "kvdoctor"
    # Loading onnx or numpy would be seen here: the shell waits for every answer.
    guard = "import sys\nsys.modules.update(dict.fromkeys(('onnx', 'numpy', 'rich', 'onnxruntime')))\n"
    program.write_text(f"#!{sys.executable}\n{guard}from kvdoctor.cli.main import main\n\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    script = COMPLETED.format(words=words, at=at)
    done = subprocess.run([bash, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert set(done.stdout.split()) == answers


def test_completion_is_told_for_the_shells_that_click_knows() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    for shell in ("bash", "zsh", "fish"):
        assert get_completion_class(shell) is not None
        assert f"_KVDOCTOR_COMPLETE={shell}_source kvdoctor" in page
