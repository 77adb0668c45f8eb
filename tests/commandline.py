"""Commands in this process; an exception that is not an exit is the test's failure."""

from click.testing import CliRunner

from zb_hdf5.commands.zb import zb


def run(group, *arguments):
    return CliRunner().invoke(group, [str(argument) for argument in arguments], catch_exceptions=False)


def run_zb(*arguments):
    return run(zb, *arguments)
