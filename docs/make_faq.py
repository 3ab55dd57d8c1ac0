"""Writes docs/faq.md, which is the file of `kvdoctor explain TEXT`: `python docs/make_faq.py`."""

from pathlib import Path

from kvdoctor.report.known_messages import read_page

if __name__ == "__main__":
    Path(__file__).with_name("faq.md").write_text(read_page(), encoding="utf-8")
