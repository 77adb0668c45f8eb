"""One file of ids that was found, and how it is opened: what a format takes to open it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.formats.flat_digest import FlatDigest
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.spec import StoreMeta

if TYPE_CHECKING:  # h5py, which most formats do not need
    from zb_hdf5.formats.h5_column import Column


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """A file by itself, or as a part of a store: then one of its columns is read.

    Attributes
    ----------
    path
        The file.
    access, verify
        As for `open_reader`.
    meta
        The column that is read: tokens as batches or as chunks of a stream, or the values of a field. None: the tokens,
        as the file has them.
    known
        The facts that a look has found; None: they are looked for.
    identity
        The identity that the file had; another file of its name is refused. None: that of the facts, if these have one.
    digest
        The digests that were made of it; None: none were.
    look
        The look at it, whose open descriptor is taken; None: the file is opened.
    """

    path: Path
    access: str = "auto"
    verify: str = "auto"
    meta: StoreMeta | None = None
    known: Column | FlatFacts | None = None
    identity: Identity | None = None
    digest: FlatDigest | None = None
    look: Look | None = None

    @property
    def column(self) -> Column | None:
        """The column of an HDF5 file that a look has found."""
        return None if isinstance(self.known, FlatFacts) else self.known

    @property
    def of_stream(self) -> tuple[FlatFacts, StoreMeta]:
        """The facts of a file of a flat format, and the chunks or the field that is read of it: both are known."""
        if not isinstance(self.known, FlatFacts) or self.meta is None:
            raise TypeError(f"{self.path}: expected the facts of the file and its chunks, found {self}")
        return self.known, self.meta
