"""Commands in this process; an exception that is not an exit is the test's failure."""

import json

import click
from click.testing import CliRunner

from zb_hdf5.commands.zb import zb
from zb_hdf5.console import JSON_VERSION


def run(group, *arguments, code=None):
    """Run a command of a group; see that it ends with an exit code, if one is given."""
    done = CliRunner().invoke(group, [str(argument) for argument in arguments], catch_exceptions=False)
    assert code is None or done.exit_code == code, done.output
    return done


def run_zb(*arguments, code=None):
    return run(zb, *arguments, code=code)


def succeed(group, *arguments):
    return run(group, *arguments, code=0)


def report_of(group, *arguments, code=0):
    """Return the JSON that a command prints, without its version, or its errors where it prints none."""
    done = run(group, *arguments, "--json", code=code)
    if not done.stdout:
        return done.stderr
    found = json.loads(done.stdout)
    assert found.pop("version") == JSON_VERSION
    return found


def one_error(result, code=None):
    """Return the message of a failed command: all that it printed."""
    assert result.exit_code == (code or result.exit_code) != 0, result.output
    assert (result.stdout, result.stderr.count("Error: ")) == ("", 1), result.output
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("Error: ").strip()


def commands_of(group, *names):
    """Yield the words of each command and each group, and the command."""
    yield " ".join(names) or group.name, group
    for name in group.list_commands(click.Context(group)) if isinstance(group, click.Group) else ():
        yield from commands_of(group.get_command(click.Context(group), name), *names, name)
