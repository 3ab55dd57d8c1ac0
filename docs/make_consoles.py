"""Plays the commands that the pages show, and writes what they print beneath them.

`python docs/make_consoles.py` brings README and docs up to date; the tests hold the pages against the same play.

A block begins with three backticks and `console`. Its lines with `$ ` are commands, what follows is what they print,
errors included. The blocks of a page are played in their order, by one bash, in a folder of their own that holds a copy
of the fixtures: a reader who follows the page from the root of the repository sees the same. Versions, times and the
last digits of differences belong to a machine, so they are not compared.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "\x1e"
"""Stands in the output between two commands."""

PROGRAMS = {
    "kvdoctor": "#!{python}\nfrom kvdoctor.cli.main import main\n\nmain()\n",
    "python": '#!/bin/sh\nexec "{python}" "$@"\n',
}

VARIES = (
    (r"\b(kvdoctor|onnxruntime|onnx|numpy|click|rich|psutil|msgspec|python|Python)( |==)\d[\w.]*", r"\1 VERSION"),
    (r"\b(platform )?(linux|darwin|win32) \w+", "PLATFORM"),
    (r"\b\d+(\.\d+)? (ms|s|times)\b", r"N \2"),
    (r"\b(\d+(\.\d+)?x|none) at\b", "Nx at"),
    (r"\b\d(\.\d+)?e[-+]\d\d\b", "SMALL"),
    (r"\boff by \d+(\.\d+)?", "off by N"),
    (r"\b\d{1,3}(,\d{3})+ bytes", "N bytes"),
    (r"\b\d+\.\d+ KiB", "N KiB"),
    (r"(?<=\S) {2,}", "  "),
    (r" +$", ""),
)


def commands(block: str) -> list[str]:
    """The commands of a block; one that ends in a backslash goes on in the next line."""
    joined = block.replace("\\\n", "\\\0")
    return [line[2:].replace("\\\0", "\\\n") for line in joined.splitlines() if line.startswith("$ ")]


def played(page: str) -> str:
    """The page with what its commands print today."""
    wanted = [command for match in BLOCK.finditer(page) for command in commands(match[1])]
    outputs = iter(_outputs(wanted) if wanted else [])

    def block(match: re.Match[str]) -> str:
        lines = (f"$ {command}\n{next(outputs)}" for command in commands(match[1]))
        return f"```console\n{''.join(lines)}```"

    return BLOCK.sub(block, page)


def comparable(page: str) -> str:
    """The page without what differs between machines and between runs."""
    for pattern, instead in VARIES:
        page = re.sub(pattern, instead, page, flags=re.MULTILINE)
    return page


def runs_a_model(page: str) -> bool:
    """Whether a command of the page runs decode steps, and so takes seconds."""
    slow = re.compile(r"kvdoctor (step-test|re-export|gate|repro|diff|loop)|python")
    return any(slow.search(command) for match in BLOCK.finditer(page) for command in commands(match[1]))


def pages() -> Iterator[Path]:
    """Every page that shows commands; the README in other languages goes by the English one."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if BLOCK.search(path.read_text(encoding="utf-8")):
            yield path


def _outputs(wanted: list[str]) -> list[str]:
    script = "".join(f"{{ was=$?; printf '{MARK}'; (exit $was); }}\n{command}\n" for command in wanted)
    with TemporaryDirectory() as folder:
        at, programs = Path(folder, "here"), Path(folder, "programs")
        for models in ("exports", "from_scratch"):
            shutil.copytree(ROOT / "fixtures" / models, at / "fixtures" / models)
        programs.mkdir()
        for name, program in PROGRAMS.items():
            (programs / name).write_text(program.format(python=sys.executable), encoding="utf-8")
            (programs / name).chmod(0o755)
        strange = ("GITHUB_", "KVDOCTOR", "XDG_CACHE_HOME")
        env = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        env |= {
            "LC_ALL": "C.UTF-8",
            "PATH": f"{programs}{os.pathsep}{env['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": folder,
        }
        command = ["bash", "--noprofile", "--norc", "-c", f"exec 2>&1\n{script}"]
        done = subprocess.run(command, cwd=at, env=env, capture_output=True, encoding="utf-8", check=False)
    outputs = done.stdout.split(MARK)[1:]
    if len(outputs) != len(wanted):
        raise RuntimeError(f"bash ended after {len(outputs)} of {len(wanted)} commands: {done.stdout[-400:]}")
    if "Traceback (most recent call last)" in done.stdout:
        raise RuntimeError(f"a command broke, and no page shows that: {done.stdout[-400:]}")
    return [output if output.endswith("\n") or not output else f"{output}\n" for output in outputs]


def main() -> None:
    """Bring the pages up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="*", type=Path, default=[*pages()])
    for path in parser.parse_args().page:
        page = path.read_text(encoding="utf-8")
        today = played(page)
        if comparable(today) != comparable(page):
            path.write_text(today, encoding="utf-8")
            print(f"{path}: written")


if __name__ == "__main__":
    main()
