"""The parts of the HTML page, one file each; `report/html.py` puts them together.

They take parts of a report and return elements. The sentences come from `report/wording`; no part decides a verdict.
"""
