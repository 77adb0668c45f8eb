"""What must be refused: an error of a type, with a message. Needs no test framework."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refuses(error: type[BaseException], match: str = "") -> Iterator[None]:
    """Fail unless the block raises `error` with a message that `match` is found in.

    Parameters
    ----------
    match
        A regular expression.

    Raises
    ------
    AssertionError
        If nothing is raised, or another message.
    """
    try:
        yield
    except error as found:
        if not re.search(match, str(found)):
            raise AssertionError(f"expected a message that matches {match!r}, found {found}") from found
    else:
        raise AssertionError(f"expected {error.__name__}, found no error")
