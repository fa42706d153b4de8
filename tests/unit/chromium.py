"""A page as headless Chromium draws it: its pixels, and where its elements are."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium, or run .ci/run"
)

# A window is never narrower than 500 pixels, a frame may be; and a frame's sandbox turns scripts off.
_FRAME = """<!DOCTYPE html><html><body style="margin:0"><iframe id="f" src="page.html" {sandbox}
style="border:0;width:{width}px;height:{height}px;display:block"></iframe><script>
addEventListener('load',function(){{
  var view=document.getElementById('f').contentWindow,page=view.document,found={{}};
  function boxes(selector){{return Array.from(page.querySelectorAll(selector)).map(function(e){{
    var b=e.getBoundingClientRect();
    return {{left:b.left,right:b.right,top:b.top,bottom:b.bottom,text:e.textContent}};}});}}
  {selectors}.forEach(function(s){{found[s]=boxes(s);}});
  {act}
  var root=page.documentElement;
  var result={{boxes:found,width:view.innerWidth,scroll:root.scrollWidth,height:root.scrollHeight,
    reading:page.querySelector('.reading')?page.querySelector('.reading').textContent:null}};
  document.documentElement.dataset.result=JSON.stringify(result);
}});</script></body></html>"""


@dataclass(frozen=True)
class Box:
    """Where an element is, in pixels of the page, and its text."""

    left: float
    right: float
    top: float
    bottom: float
    text: str

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def overlaps(self, other: Box) -> bool:
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > 0.5 and min(self.bottom, other.bottom) - max(self.top, other.top) > 0.5


@dataclass(frozen=True)
class Drawn:
    """picture: RGB. boxes: by selector. width, scroll: of the window, and of what is in it."""

    picture: Image.Image
    boxes: dict[str, list[Box]]
    width: int
    scroll: int
    reading: str | None

    def at(self, x: float, y: float) -> tuple[int, int, int]:
        return self.picture.getpixel((int(x), int(y)))


def draw(
    page: str,
    folder: Path,
    *,
    width: int,
    selectors: Sequence[str] = (),
    scripts: bool = True,
    dark: bool = False,
    act: str = "",
) -> Drawn:
    """The page in a frame of that width, without a network. act: script that runs before results are read."""
    height = 4000
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "page.html").write_text(page, encoding="utf-8")
    sandbox = "" if scripts else 'sandbox="allow-same-origin"'
    frame = _FRAME.format(sandbox=sandbox, width=width, height=height, selectors=json.dumps(list(selectors)), act=act)
    (folder / "frame.html").write_text(frame, encoding="utf-8")
    command = [
        str(CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"),
        *("--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(500, width)},{height}",
        f"--screenshot={folder / 'page.png'}",
        "--dump-dom",
        (folder / "frame.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    written = re.search(r'data-result="([^"]*)"', done.stdout)
    assert written is not None, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(html.unescape(written[1]))
    boxes = {selector: [Box(**box) for box in found] for selector, found in result["boxes"].items()}
    picture = Image.open(folder / "page.png").convert("RGB")
    return Drawn(picture, boxes, result["width"], result["scroll"], result["reading"])
