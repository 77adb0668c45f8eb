"""An engine that stops in the middle of its work."""

from zb_hdf5.converters.pipeline.engines import Inline


class Stops(Exception):
    """What it raises."""


class Failing(Inline):
    """Runs some tasks, of all that it is given, and then fails."""

    def __init__(self, tasks):
        self.left = tasks

    def run(self, function, tasks, progress):
        for result in super().run(function, tasks, progress):
            if not self.left:
                raise Stops
            self.left -= 1
            yield result
