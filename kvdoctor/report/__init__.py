"""One report document, its sections made once as blocks, and one writer for each format.

`document` is what a command found. `sections` makes blocks of it (`blocks`), in the order of `sections.whole`, with
the sentences of `wording`. `console`, `markdown` and `page.write` write blocks; `text` has the first screen. JSON,
SARIF, JUnit and GitHub annotations are made of the document itself. `formats` is the table of formats. Nothing here
reads a model or runs it, and findings come from `diagnose`, which may import this package.
"""
