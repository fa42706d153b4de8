"""The README's picture, from a real run: python docs/make_picture.py (needs pyte; trains for about three minutes)

Runs the quickstart in a pseudo-terminal, reads its screen as a terminal would, and draws that as SVG: once while it
trains and once when it has ended.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 100, 60
COMMAND = "trainfit train recipes/quickstart.yaml"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        running, ended = record([*COMMAND.split(), f"run_folder={folder}/run"])
    images = Path(__file__).parent / "images"
    images.mkdir(exist_ok=True)
    draw(running, ended, images / "quickstart.svg")


def record(command: list[str]) -> tuple[pyte.Screen, pyte.Screen]:
    """The screen in the middle of training, and at the end."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=terminal, env=environment)
    os.close(terminal)
    screen, middle = pyte.Screen(COLUMNS, LINES), pyte.Screen(COLUMNS, LINES)
    stream, frames = pyte.ByteStream(screen), pyte.ByteStream(middle)
    seen = b""
    while process.poll() is None or select.select([controller], [], [], 0.2)[0]:
        try:
            chunk = os.read(controller, 65536)
        except OSError:
            break
        stream.feed(chunk)
        if not re.search(rb"1[0-5]\d/160", seen):
            frames.feed(chunk)
            seen += chunk
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return middle, screen


def draw(running: pyte.Screen, ended: pyte.Screen, path: Path) -> None:
    """The last line of the running screen stands where the bar was, between plan and result."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ {COMMAND}", style="bold"))
    bar = [line for line in rows(running) if "/160" in line.plain][-1:]
    for line in rows(ended):
        if "/160" in line.plain and bar:
            console.print(bar.pop())
        console.print(line)
    svg = console.export_svg(title="trainfit")
    # The fonts would be fetched from the network; any monospace font of the reader's does.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    path.write_text(svg)


def rows(screen: pyte.Screen) -> list[Text]:
    """Lines with their colours, without the empty ones at the end."""
    lines = []
    for number in range(screen.lines):
        text = Text()
        for column in range(screen.columns):
            cell = screen.buffer[number][column]
            text.append(cell.data, Style(color=colour(cell.fg), bold=cell.bold, italic=cell.italics))
        text.rstrip()
        lines.append(text)
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return [hidden_path(line) for line in lines]


def hidden_path(line: Text) -> Text:
    """The run went to a temporary folder, which is nobody's business."""
    return Text("run folder     runs/quickstart") if line.plain.startswith("run folder") else line


def colour(name: str) -> str | None:
    names = {"default": None, "brown": "yellow"}
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return names.get(name, name.replace("bright", "bright_"))


if __name__ == "__main__":
    main()
