"""How many examples of a property are tried."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> settings:
    """Return the settings of a property that tries so many of 100 examples with --slow, and else its share of them."""
    return settings(max_examples=max(3, number * settings().max_examples // 100))
