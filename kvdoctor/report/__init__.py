"""One report document and one file for each format that it is written in.

`document` is what a command found; `formats` is the table of formats, and `render` writes one: text, Markdown, HTML,
JSON, SARIF, JUnit and GitHub annotations. The sentences that they share are in `wording`, the parts of the HTML page
in `page`. Nothing here reads a model or runs it, and findings come from `diagnose`, which may import this package.
"""
