"""The code of a page as the site shows it: no line is wider than the column, so none is cut off.

A comment beside a line that is too long stands above it, a command goes on in the next line, and Python is formatted
for the width. The pages themselves keep their lines: programs read them, and a line that is typed is one piece there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

#: Characters of a line that a desk of 1280 pixels shows.
WIDTH = 88
#: Words that begin a command; other lines without a language are outputs, which stay as they are.
PROGRAMS = (
    r"zb|convert|pip|python|sbatch|srun|torchrun|salloc|scontrol|export|make|lfs|mkdir|rsync|cd|git|echo|curl"
    r"|tests/cluster/slurm_cluster\.py|\.venv/bin/\w+"
)
_COMMAND = re.compile(rf"(?:\w+=\S* )*(?:\w+=\$\()?(?:{PROGRAMS})\b")
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
#: Words of a command that stay together: an option with its value, and what is in quotes.
_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
_WORDS = re.compile(rf"--?[a-zA-Z][\w-]* (?![-|&\\]){_WORD}|{_WORD}")
#: Lines of Python where a block names no language.
_PYTHON = re.compile(r"^(?:\w+ = |def |class |from |import |with )", re.MULTILINE)
#: Code, and the comment beside it.
_COMMENTED = re.compile(r"(?P<code>.*?\S)\s{2,}# (?P<comment>\S.*)")


def fitted(text: str) -> str:
    """Return a page with code that fits the column."""
    return _BLOCK.sub(_fitted_block, text)


def _fitted_block(block: re.Match[str]) -> str:
    indent, language, code = block["indent"], block["language"], textwrap.dedent(block["code"])
    if not language and _PYTHON.search(code) and _is_python(code):
        language = "python"
    if language not in ("", "bash", "python"):
        return block[0]
    if not language and all(map(_is_typed, code.splitlines())):
        language = "bash"  # lines that a phone may wrap: an output has columns
    lines = _python(code) if language == "python" else [*_commands(code.splitlines())]
    return f"{indent}```{language}\n" + textwrap.indent("\n".join(lines), indent).rstrip() + f"\n{indent}```"


def _is_typed(line: str) -> bool:
    return not line.strip() or line.startswith("#") or _COMMAND.match(line) is not None


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _python(code: str) -> list[str]:
    """Return lines of Python: comments above those that are too long, and the rest as ruff formats it."""
    lines = []
    for line in code.splitlines():
        found = _COMMENTED.fullmatch(line) if len(line) > WIDTH else None
        if found is not None:
            margin = re.match(r" *", line)[0]
            lines += _comment(found["comment"], f"{margin}# ")
            line = found["code"]
        lines.append(line)
    if max(map(len, lines)) <= WIDTH:
        return lines
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={WIDTH}", "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else lines


def _comment(text: str, mark: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=mark)


def _commands(lines: list[str]) -> Iterator[str]:
    """Yield commands, with all comments above them where one does not fit beside; yield outputs as they are."""
    are_above = any(len(line) > WIDTH and _COMMAND.match(line) and _COMMENTED.fullmatch(line) for line in lines)
    before = ""
    for line in lines:
        found = _COMMENTED.fullmatch(line) if are_above and _COMMAND.match(line) else None
        if found is not None:
            yield from [""] if before else []
            yield from _comment(found["comment"], "# ")
            line = found["code"]
        yield from _continued(line) if len(line) > WIDTH and _COMMAND.match(line) else [line]
        before = line


def _continued(line: str) -> Iterator[str]:
    """Yield a command in lines that fit, each but the last one with a backslash."""
    begun = ""
    for part in _WORDS.findall(line):
        longer = f"{begun} {part}" if begun else part
        if len(longer) > WIDTH - 2 and begun:
            yield f"{begun} \\"
            longer = f"    {part}"
        begun = longer
    yield begun
