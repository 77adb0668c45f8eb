"""Pages of the documentation, whose blocks run one after the other, as a reader would type them.

The comments beside code and the prose are claims too: those that name a key, an attribute, a shape, a value or a file
are compared with what the code gives.
"""

import ast
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

from click.testing import CliRunner
from commandline import commands_of

from zb_hdf5.commands.zb import zb

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")])


def name_of(page):
    """Return the name of a page: that of its file, or of its folder and file below `docs/`."""
    return page.name if page == README else page.relative_to(ROOT / "docs").as_posix()


TEXT = {name_of(page): page.read_text(encoding="utf-8") for page in (README, *PAGES)}
TUTORIALS = {name for name in TEXT if name.startswith("tutorials/")}
#: Pages whose commands run between their Python examples.
COMMANDS_RUN = {"coming_from.md", "documents.md", "start.md", "train.md", *TUTORIALS}
#: The language of a block, and its lines.
BLOCK = re.compile(r"^ *```([\w{}-]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
#: The lines of each example.
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
SHAPE = re.compile(r"(torch\.int\d+), \[([\d, ]+)\]")
#: A value of a page by its key, in prose.
BY_KEY = re.compile(r"""`(\w+)\["(\w+)"\]`""")
ATTRIBUTE = re.compile(r"(?<![\w.])\.(\w+)")


def run_page(text, names, capsys, *, with_commands=True):
    """Run the blocks of a page, and return how many claims beside them were compared.

    Parameters
    ----------
    names
        The names that its Python finds, and adds to.
    with_commands
        The lines that begin with `zb` run too.
    """
    printed = ""
    compared = 0
    for language, example in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(example, names)
            compared += sum(is_compared(node, comment, names) for node, comment in claims_in(example))
            printed = capsys.readouterr().out
        elif language == "text":  # what one sees: each line is in the output of the block before it
            assert not [line for line in example.splitlines() if line not in printed], printed
        elif with_commands:
            printed = ran(line for line in example.splitlines() if line.startswith("zb ")) or printed
    for name, key in BY_KEY.findall(text):
        if isinstance(names.get(name), dict):
            assert key in names[name], f'{name}["{key}"]'
            compared += 1
    return compared


def claims_in(example):
    """Yield each statement of an example that has a comment at the end of its first line, and the comment."""
    lines = example.splitlines()
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.stmt):
            _, mark, comment = lines[node.lineno - 1].partition("  # ")
            if mark:
                yield node, comment


def is_compared(node, comment, names):
    """Compare a comment with the value beside it; return whether there was anything to compare."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Subscript) and '"' in comment:
        whole = eval(ast.unparse(node.value.value), names)
        claimed = {ast.literal_eval(node.value.slice), *re.findall(r'"(\w+)"', comment)}
        assert set(whole) == claimed, (set(whole), comment)
        return True
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.For) else []
    found = [names[each.id] for target in targets for each in ast.walk(target) if getattr(each, "id", None) in names]
    claim = SHAPE.match(comment)
    attributes = ATTRIBUTE.findall(comment) if comment.startswith(".") else []
    for value in found:
        if claim:
            assert (str(value.dtype), list(value.shape)) == (claim[1], ast.literal_eval(f"[{claim[2]}]")), comment
        assert not [name for name in attributes if not hasattr(value, name)], comment
        with suppress(SyntaxError, ValueError):  # most are words
            assert ast.literal_eval(comment) == value
    return bool(found) and bool(claim or attributes)


def words_of(command):
    """Return the words of a command line as a shell gives them to its program."""
    if "$" not in command:
        return shlex.split(command)
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], check=True, capture_output=True, text=True)
    return printed.stdout.split("\0")[:-1]


def ran(lines, code=0):
    """Run command lines, and return what they print; files that a comment names as a result are there."""
    printed = ""
    for line in lines:
        command, _, comment = line.partition("  #")
        words = words_of(command)[1:]
        done = CliRunner().invoke(zb, words)
        assert done.exit_code == code, f"{line}\n{done.output}"
        printed += done.output if code else done.stdout
        stems = {Path(word).stem for word in words if not word.startswith("-")}
        named = [name for name in re.findall(r"[\w-]+(?:\.\w+)+", comment) if {name, name.partition(".")[0]} & stems]
        assert not [name for name in named if not Path(name).exists()], line
    return printed


def variables_in(line):
    """Return the variables that a line with `export` sets."""
    words = shlex.split(line, comments=True)[1:]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


#: The names of all commands and their groups.
COMMANDS = {"zb", *(f"zb {name}" for name, _ in commands_of(zb))}


def names_a_file(command):
    """Return whether a command in a sentence is a whole line: a name follows it, and none that stands for others."""
    words = command.split()
    while " ".join(words) not in COMMANDS:
        words.pop()
    names = command.split()[len(words) :]
    follows = bool(names) and not names[0].startswith("-")
    return follows and not any(re.match(r"[A-Z]+\b", word) for word in names)


def untagged_in(text):
    """Return the blocks of a page that have lines to type, or an output, and no name of a language."""
    return [block for language, block in BLOCK.findall(text) if language in ("", "bash")]


def with_any_numbers(line):
    """Return a line in which all numbers and all spaces are the same, and lines that are drawn to its end too."""
    return re.sub(r"─+$", "─", " ".join(re.sub(r"\d[\d,.]*", "0", line).split()))
