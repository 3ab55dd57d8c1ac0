"""The parts of the HTML page, one file each: what is shown, in which shape; `report/html.py` puts them together."""
