"""How many examples of a property are tried."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> settings:
    """Return the settings of a property that tries this many examples with --slow, and else its share of them.

    Properties that name no number try 100; `conftest.py` says how many of those are tried without --slow.
    """
    return settings(max_examples=max(1, number * settings().max_examples // 100))
