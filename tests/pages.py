"""Pages of the documentation, whose blocks run one after the other, as a reader would type them."""

import re
import shlex

from click.testing import CliRunner

from zb_hdf5.commands.zb import zb


def run_page(text, names, capsys, *, with_commands=True):
    """Run the blocks of a page.

    Parameters
    ----------
    names
        The names that its Python finds, and adds to.
    with_commands
        The lines that begin with `zb` run too.
    """
    printed = ""
    for language, example in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(example, names)
            printed = capsys.readouterr().out
        elif language == "text":  # what one sees: each line is in the output of the block before it
            assert not [line for line in example.splitlines() if line not in printed], printed
        elif with_commands:
            printed = ran(line for line in example.splitlines() if line.startswith("zb ")) or printed


def ran(lines):
    """Run command lines, and return what they print."""
    printed = ""
    for line in lines:
        done = CliRunner().invoke(zb, shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, done.output
        printed += done.stdout
    return printed
