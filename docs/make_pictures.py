"""Makes the pictures of the page: `python docs/make_pictures.py` (needs Chromium, and `convert` of ImageMagick).

They are screenshots of the page of the README's example. Browser and fonts show in them, so no test compares them: run
this where the page looks different than before.
"""

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvdoctor

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MODEL = "fixtures/exports/marian-4.46.3"
WIDTH, EDGE = 1200, 8
COLORS = "64"
PICTURES = {
    "report.png": ("body", ".finding.error"),
    "report-pictures.png": ("#stack-0-cache", "#stack-0-contract .scroll"),
}
"""Of each picture the first element and the last one."""


def make_pictures(images: Path) -> None:
    """Write the pictures into a folder."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support import chromium

    browser, convert = chromium.found(), shutil.which("convert")
    if browser is None or convert is None:
        sys.exit("Chromium or ImageMagick was not found: apt-get install chromium imagemagick")
    with TemporaryDirectory() as folder, chromium.tab(browser) as tab:
        page = Path(folder) / "report.html"
        page.write_text(kvdoctor.render(kvdoctor.step_test(MODEL), "html"), encoding="utf-8")
        tab.size(WIDTH)
        tab.colors("light")
        tab.open(page.as_uri())
        for name, ends in PICTURES.items():
            (left, top, right, _), (*_, bottom) = (_find_box(tab.evaluate, selector) for selector in ends)
            x, y = max(left - EDGE, 0), max(top - EDGE, 0)
            area = {"x": x, "y": y, "width": min(right + EDGE, WIDTH) - x, "height": bottom + EDGE - y, "scale": 1}
            made = tab.call("Page.captureScreenshot", clip=area, captureBeyondViewport=True)["data"]
            small = [convert, "png:-", "+dither", "-colors", COLORS, "-strip", f"png8:{images / name}"]
            subprocess.run(small, input=base64.b64decode(made), check=True)


def _find_box(evaluate: Callable[[str], Any], selector: str) -> list[float]:
    """Left, top, right and bottom of an element on the page, in pixels."""
    box = f"document.querySelector({selector!r}).getBoundingClientRect()"
    found: list[float] = evaluate(f"(box => [box.left, box.top, box.right, box.bottom])({box})")
    return found


if __name__ == "__main__":
    make_pictures(IMAGES)
