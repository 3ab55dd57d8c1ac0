"""How Sphinx builds the pages: `python -m sphinx -W -b html docs site`. What is built asks nothing of the network."""

from kvdoctor import __version__

project = "kvdoctor"
author = "the authors of kvdoctor"
release = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["site"]
html_theme = "furo"
html_title = "kvdoctor"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"source_repository": "https://github.com/kvdoctor/kvdoctor/", "source_branch": "main"}
html_theme_options["source_directory"] = "docs/"
