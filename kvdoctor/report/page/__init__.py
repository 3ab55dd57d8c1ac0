"""The HTML page: elements, drawings, and the writer of blocks; `report/html.py` puts a page together.

The sections come from `report/sections`; no part of this package decides a verdict.
"""
