"""The README's picture of a page: python docs/make_page_picture.py plan.html (needs chromium)

What is drawn is the memory through the step with its tables, as on a wide window; README says which plan it is of.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, HEIGHT = 1140, 530
# Nothing of the page but the first picture and the tables beside it.
ONLY = (
    "<style>main>*{display:none!important}main>.pair:not(.even){display:grid!important}main{padding-top:.5rem}</style>"
)


def main(page: Path) -> None:
    target = Path(__file__).parent / "images" / "plan-page.png"
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "page.html"
        alone.write_text(page.read_text().replace("</head>", f"{ONLY}</head>"))
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        command = ["chromium", *options, f"--screenshot={target}", alone.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
