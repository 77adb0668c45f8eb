"""Commands in this process; an exception that is not an exit is the test's failure."""

import json

from click.testing import CliRunner

from zb_hdf5.commands.zb import zb


def run(group, *arguments):
    return CliRunner().invoke(group, [str(argument) for argument in arguments], catch_exceptions=False)


def run_zb(*arguments):
    return run(zb, *arguments)


def succeed(group, *arguments):
    done = run(group, *arguments)
    assert done.exit_code == 0, done.output
    return done


def report_of(group, *arguments):
    """Return what a command that succeeds prints with --json."""
    return json.loads(succeed(group, *arguments, "--json").stdout)
