"""What every loader does: one protocol, which `zb_hdf5.testing.check_loader` checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self, runtime_checkable


@runtime_checkable
class TokenLoader(Protocol):
    """Gives batches, and knows where it stands. A loader with epochs has a length too; an endless one has none.

    Notes
    -----
    `iter(loader)` yields one epoch, or, where there are no epochs or the end is not known, the rest. `next(loader)` and
    `get_batch()` give the next batch without it.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def get_batch(self) -> Any:
        """Return the next batch, for ever: behind an epoch comes the next one."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A position in this epoch is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, in plain JSON values. `kind` says what takes it."""

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly where `state_dict` was taken. `force`: even if it is of other data or another order."""

    def close(self) -> None:
        """End threads and release files. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
