"""How Sphinx builds the pages: `python -m sphinx -W -b html docs site`. What is built asks nothing of the network."""

from pathlib import Path
from typing import Any

from kvdoctor import __version__

project = "kvdoctor"
author = "the authors of kvdoctor"
release = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["site"]
html_extra_path = ["health-table.html"]
html_theme = "furo"
html_title = "kvdoctor"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"source_repository": "https://github.com/kvdoctor/kvdoctor/", "source_branch": "main"}
html_theme_options["source_directory"] = "docs/"


def setup(app: Any) -> None:
    """Let the index name pages of parts that this checkout does not have."""
    app.connect("source-read", _without_absent_pages)


def _without_absent_pages(app: Any, name: str, source: list[str]) -> None:
    parts = ("gate", "policy", "baseline", "formats", "html", "diff", "python")
    absent = {part for part in parts if not Path(app.srcdir, f"{part}.md").exists()}
    if name == "index":
        source[0] = "\n".join(line for line in source[0].split("\n") if line not in absent)
