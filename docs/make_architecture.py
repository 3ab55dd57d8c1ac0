"""Draws the packages and their imports into docs/architecture.md: `python docs/make_architecture.py`.

The table `LAYERS` is the architecture: tests/test_architecture.py compares the code with it. The picture and the
table of packages on the page are made from it, from the imports in the code, and from the docstrings of the packages.
"""

import ast
import re
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvdoctor"
PROGRAMS = PACKAGE / "addons" / "loops" / "programs"
"""Projects that are copied, and import nothing of the package."""
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

LAYERS = (
    ("__init__", "_version", "errors", "records", "choices", "contract", "addons"),
    ("decode",),
    ("model",),
    ("analysis",),
    ("runtime",),
    ("findings",),
    ("options",),
    ("report",),
    ("diagnose",),
    ("repair",),
    ("gating",),
    ("api",),
    ("cli",),
    ("addons/traces",),
    ("addons/comparison", "addons/conversions", "addons/loops", "addons/reproducer"),
    ("__main__",),
)
"""Folders and files in the root of `kvdoctor/`, lowest layer first: each imports packages of lower layers only.

The add-ons are the upper floor: `addons` is the module that finds them.
"""

LEAVES = LAYERS[0]
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `kvdoctor`; the package itself is `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if PROGRAMS in path.parents:
            continue
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name if name == "__init__" else name.removesuffix(".__init__")] = path
    return found


def package_of(module: str) -> str:
    """The package of a module: the first part of its name, for an add-on the first two."""
    first, _, rest = module.partition(".")
    return f"addons/{rest.partition('.')[0]}" if first == "addons" and rest else first


@cache
def imported(path: Path, *, also_for_types: bool = False) -> frozenset[str]:
    """Modules and names that a file imports when it runs, at any depth of the file."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not also_for_types:
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def imports() -> dict[str, set[str]]:
    """The modules of the package that each module imports when it runs."""
    known = modules()
    found = {}
    for name, path in known.items():
        inside = {each.removeprefix("kvdoctor.") for each in imported(path) if each.startswith("kvdoctor.")}
        found[name] = {_module_of(each, known) for each in inside} - {name, ""}
    return found


def package_imports() -> dict[str, set[str]]:
    """The packages that each package imports."""
    found: dict[str, set[str]] = {name: set() for level in LAYERS for name in level}
    for name, others in imports().items():
        found[package_of(name)] |= {package_of(other) for other in others} - {package_of(name)}
    return found


def _module_of(name: str, known: dict[str, Path]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def summary(name: str) -> str:
    """The first sentence of a package's docstring."""
    path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def table() -> str:
    """The packages from the command line down to the leaves, with their size and their first sentence."""
    lines = ["| package | files | contents |", "| --- | --- | --- |"]
    for level in reversed(LAYERS):
        for name in level:
            if name == "addons":
                lines.append(f"| `addons/__init__.py` | 1 | {summary(name)} |")
            elif (PACKAGE / name).is_dir():
                files = sum(PROGRAMS not in path.parents for path in (PACKAGE / name).rglob("*.py"))
                lines.append(f"| `{name}/` | {files} | {summary(name)} |")
            else:
                lines.append(f"| `{name}.py` | 1 | {summary(name)} |")
    return "\n".join(lines)


def drawn() -> list[tuple[str, ...]]:
    """The levels that the picture shows, from top to bottom; the leaf files are one box."""
    return [*(level for level in reversed(LAYERS[1:]) if level != ("__main__",)), ("errors, choices, contract ...",)]


def arrows() -> set[tuple[str, str]]:
    """Imports between packages without those that follow from others, so that the picture can be read."""
    direct = {name: others - set(LEAVES) for name, others in package_imports().items() if name not in LEAVES}

    def reached(name: str) -> set[str]:
        return direct[name].union(*(reached(other) for other in direct[name]))

    return {
        (name, other)
        for name, others in direct.items()
        for other in others
        if name != "__main__" and not any(other in reached(between) for between in others - {other})
    }


def picture() -> str:
    """The packages as an SVG picture: each level a row, each arrow an import."""
    width, row, box = 720, 74, 40
    places: dict[str, tuple[float, float, float]] = {}
    shapes = []
    for number, level in enumerate(drawn()):
        for place, name in enumerate(level):
            wide = max(120.0, 9.0 * len(name) + 24)
            x = width * (place + 1) / (len(level) + 1)
            y = 20 + row * number
            places[name] = (x, y, wide)
            shapes.append(
                f'<rect x="{x - wide / 2:.0f}" y="{y}" width="{wide:.0f}" height="{box}" rx="6"/>'
                f'<text x="{x:.0f}" y="{y + 25}">{escape(name)}</text>'
            )
    lines = []
    for name, other in sorted(arrows()):
        (x1, y1, _), (x2, y2, _) = places[name], places[other]
        skipped = round((y2 - y1) / row) - 1
        bend = 0 if skipped == 0 else (1 if x1 >= width / 2 else -1) * (110 + 22 * skipped)
        middle = (y1 + box + y2) / 2
        lines.append(
            f'<path d="M{x1:.0f},{y1 + box} C{x1 + bend:.0f},{middle:.0f} {x2 + bend:.0f},{middle:.0f} '
            f'{x2:.0f},{y2 - 3}" marker-end="url(#head)"/>'
        )
    height = 20 + row * len(drawn())
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>The packages of kvdoctor; an arrow is an import</title>",
            "<style>rect{fill:#eef4fb;stroke:#35608f}text{font:15px sans-serif;text-anchor:middle;fill:#12283f}"
            "path{fill:none;stroke:#35608f;stroke-width:1.3}.bg{fill:#fff;stroke:none}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0,0 L8,4 L0,8 z" style="fill:#35608f"/></marker></defs>',
            f'<rect class="bg" width="{width}" height="{height}"/>',
            *lines,
            *shapes,
            "</svg>\n",
        )
    )


def page() -> str:
    """The page with today's table of packages."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
