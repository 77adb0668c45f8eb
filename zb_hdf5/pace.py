"""The pace of some work: its rate, by which the time of the rest is estimated."""

from __future__ import annotations

from collections import deque
from typing import Final

#: The rate is that of this last share of the time, and of these last seconds at least.
LAST_SHARE: Final = 0.5
LEAST_S: Final = 20.0
#: Moments that are kept of all the time.
MOMENTS: Final = 64


class Pace:
    """The rate of work in the last half of its time.

    The rate of all the time never forgets a cache that was read first, and that of the last second jumps with each
    burst.

    Parameters
    ----------
    start_s
        The time when the work began, in seconds of a monotonic clock.
    """

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self._moments = deque([(start_s, 0)])

    def reach(self, now_s: float, done: int) -> None:
        """Note how much work is done at a moment."""
        elapsed_s = now_s - self.start_s
        if now_s - self._moments[-1][0] >= elapsed_s / MOMENTS:
            self._moments.append((now_s, done))
        oldest_s = now_s - max(LEAST_S, LAST_SHARE * elapsed_s)
        while len(self._moments) > 1 and self._moments[1][0] <= oldest_s:
            self._moments.popleft()

    def rate(self, now_s: float, done: int) -> float:
        """Return the work done in a second; 0.0 where none was."""
        since_s, before = self._moments[0]
        return (done - before) / (now_s - since_s) if now_s > since_s else 0.0

    def overall(self, now_s: float, done: int) -> float:
        """Return the work done in a second of all the time."""
        return done / (now_s - self.start_s) if now_s > self.start_s else 0.0
