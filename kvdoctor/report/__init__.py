"""One report document, many renderers."""
