"""Writes the lines that a product adds in each language into docs/loops.md: `python docs/make_loops.py`.

They are the code in the section `In your program` of each program's notes, which the README of a written project has.
"""

import re
from pathlib import Path

from kvdoctor.addons.loops.languages import LANGUAGES
from kvdoctor.addons.loops.project import NOTES

PAGE = Path(__file__).parent / "loops.md"
BEGIN, END = "<!-- languages: begin -->", "<!-- languages: end -->"
SECTION = "## In your program\n"


def page() -> str:
    """The page with the sections as they are today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{sections()}\n{END}{after}"


def sections() -> str:
    """The code of each program, under the names of the languages that have it."""
    titles: dict[Path, list[str]] = {}
    for language in LANGUAGES.values():
        titles.setdefault(language.folder, []).append(language.title)
    return "\n".join(f"### {' and '.join(names)}\n\n{_section(folder)}\n" for folder, names in titles.items())


def _section(folder: Path) -> str:
    _, _, rest = (folder / NOTES).read_text(encoding="utf-8").partition(SECTION)
    block = re.search(r"^```.*?^```$", rest.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    if block is None:
        raise RuntimeError(f"the notes in {folder} have no code in the section 'In your program'")
    return block[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
