"""The pictures of the first page: the outputs of commands as SVG, and the top of a report as PNG.

Run by `make pictures`. The PNG needs Chromium; without it, the one that is there stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from click.testing import CliRunner

from zb_hdf5.commands.zb import zb

PICTURES: Final = Path(__file__).parent / "pictures"
SENTENCES: Final = (
    "The Seine rises in Burgundy and flows through Paris to the sea.",
    "Mercury is a planet, a metal and a god.",
    "A token is a number that stands for a piece of text.",
)
AUTHORS: Final = ("Ada", "Bo")
CONVERT: Final = "convert notes.jsonl notes-h5 --tokenizer byte --seq-len 256 --batch-size 8 --packing best-fit"
#: Picture -> command, and the number of lines to show of its output.
TERMINALS: Final = {
    "info": ("info notes-h5", 40),
    "show": ("show notes-h5 --batch 3 --all", 20),
}
#: Lines that differ from run to run.
VARYING: Final = ("written ", "access ")
CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome")
#: The page is cut between two rows of its table.
HEADLESS: Final = ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=840,597")
#: Picture -> the colours that Chromium prefers, by its number.
SCHEMES: Final = {"report.png": 1, "report-dark.png": 0}
STYLE: Final = """<style>
rect { fill: #f6f8fa; stroke: #d0d7de } text { fill: #1f2328; font: 13px ui-monospace, monospace; white-space: pre }
.dim { fill: #57606a }
@media (prefers-color-scheme: dark) {
  rect { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .dim { fill: #8b949e }
}
</style>"""
LINE_PX: Final = 18
COLUMN_PX: Final = 7.9


@contextlib.contextmanager
def corpus() -> Iterator[None]:
    """Make a small store of text in a folder of its own, and stay there."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with open("notes.jsonl", "w", encoding="utf-8") as file:
            for number in range(3000):
                text = f"{SENTENCES[number % 3]} Note {number}."
                file.write(json.dumps({"text": text, "author": AUTHORS[number % 2]}) + "\n")
        run(f"{CONVERT} --workers 1 --metadata-columns author")
        yield


def run(command: str) -> str:
    done = CliRunner().invoke(zb, command.split(), catch_exceptions=False, env={"COLUMNS": "84", "NO_COLOR": "1"})
    if done.exit_code:
        raise SystemExit(done.output)
    return done.stdout


def terminal(command: str, most: int) -> str:
    """Return a command and the first lines of its output as SVG, for light and dark pages."""
    shown = [line.rstrip() for line in run(command).splitlines() if not line.startswith(VARYING)][:most]
    lines = [f"$ zb {command}", *shown]
    width = round(max(map(len, lines)) * COLUMN_PX) + 32
    height = len(lines) * LINE_PX + 28
    rows = [
        f'<text x="16" y="{28 + LINE_PX * number}"{_kind(line)}>{escape(line)}</text>'
        for number, line in enumerate(lines)
        if line
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    box = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, STYLE, box, *rows, "</svg>"]) + "\n"


def _kind(line: str) -> str:
    return ' class="dim"' if line.startswith(("$", "──", "  ")) else ""


def terminals() -> dict[str, str]:
    """Return the SVG of each command, by the name of its file."""
    with corpus():
        return {f"{name}.svg": terminal(command, most) for name, (command, most) in TERMINALS.items()}


def photograph(folder: Path) -> None:
    """Take the top of the page of `zb report`, for light and dark pages."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        print("no report is photographed: there is no Chromium")
        return
    with corpus():
        run("report notes-h5 -o report.html")
        for name, scheme in SCHEMES.items():
            options = [*HEADLESS, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={folder / name}"]
            page = f"file://{os.getcwd()}/report.html"
            subprocess.run([browser, *options, page], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, text in terminals().items():
        (PICTURES / name).write_text(text, encoding="utf-8")
    photograph(PICTURES)


if __name__ == "__main__":
    main()
