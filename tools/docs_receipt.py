"""The picture of a receipt in the README: the top of the page, as Chromium shows it.

python tools/docs_receipt.py out docs/receipt.png
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser import browser

WIDTH, HEIGHT = 980, 385


def main(job: Path, picture: Path) -> None:
    """Open the receipt of a finished job and keep its first screen."""
    with browser() as tab:
        tab.size(WIDTH, HEIGHT)
        tab.media(scheme="light")
        tab.open(job / "receipt.html")
        picture.write_bytes(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
