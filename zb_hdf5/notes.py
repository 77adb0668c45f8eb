"""Notes: lines for people about the data that are read. Nothing is wrong, and nobody has to do anything."""

from __future__ import annotations

import sys
from contextlib import suppress

#: The notes that this process has printed.
_PRINTED: set[str] = set()


def note(text: str) -> None:
    """Print a line to standard error, each text once.

    Processes that `multiprocessing` has started, such as the workers of a `DataLoader`, print none: they open what the
    process above them has opened.
    """
    from multiprocessing import parent_process  # which takes longer than all else of `import zb_hdf5`

    if text in _PRINTED or parent_process() is not None or sys.stderr is None:
        return
    _PRINTED.add(text)
    with suppress(OSError, ValueError):  # of an output that is closed
        print(f"note: {text}", file=sys.stderr, flush=True)
