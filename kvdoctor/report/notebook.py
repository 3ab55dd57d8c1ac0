"""A page inside a notebook: a frame of its own, so that neither page nor notebook changes what the other looks like.

The page is a whole document, with a style sheet for `body`, `table` and `h1` and a content security policy in its head.
Written among the cells as it is, its styles would reach the notebook, the notebook's would reach it, and the policy
would be lost. A frame with `srcdoc` keeps the document whole and needs no second file. `sandbox` without permissions
forbids what the policy forbids, in the notebook's own words: scripts, forms, the notebook's origin.
"""

from kvdoctor.report.page.markup import text

HEIGHT = "40rem"


def frame(page: str, title: str) -> str:
    """A page as HTML to be written into another one. `title` names the frame, and stands above it.

    Where a notebook is shown without its frames (not trusted, or as a preview on a web site), the title is left.
    """
    # A link of a `srcdoc` is relative to the notebook: one to a section would load the notebook into the frame.
    page = page.replace("<head>", '<head><base href="about:srcdoc">', 1)
    # The page is escaped already: as the value of an attribute it is escaped once more, and not shortened.
    source = page.replace("&", "&amp;").replace('"', "&quot;")
    named = text(title)
    style = f"width:100%;height:{HEIGHT};border:1px solid #888;resize:vertical"
    return f'<p>{named}</p>\n<iframe sandbox srcdoc="{source}" title="{named}" style="{style}"></iframe>\n'
