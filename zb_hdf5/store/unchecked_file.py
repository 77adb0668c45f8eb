"""One file, whole or damaged, as its batches or the chunks of its stream: its magic bytes tell its format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zb_hdf5.errors import Remedy, UnverifiableError
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import on_failure
from zb_hdf5.formats.broken_file import BrokenFile
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.foreign import NO_DIGESTS
from zb_hdf5.formats.format import Format
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.format_list import FORMATS, backend_of_suffix, load_format
from zb_hdf5.store.recognition import detect_backend

if TYPE_CHECKING:  # h5py, which `.batch` files do not need
    from zb_hdf5.formats.h5_column import Column


def open_chunks(path: Path, read_as: ReadAs = AS_STORED) -> Corpus:
    """Open a file as its batches, or as the chunks of a stream. No read is checked. Raises as `open_unchecked`."""
    with Look(path) as look:
        return open_unchecked(load_format(FORMATS[detect_backend(look)], read_as), look)


def open_unchecked(code: Format, look: Look, known: Column | None = None) -> Corpus:
    """Open a file of a format as its batches, or as the chunks of a stream, which may be damaged. No read is checked.

    Parameters
    ----------
    look
        A look at the file, whose open descriptor is taken.
    known
        The tokens of an HDF5 file, as another look has found them; None: they are looked for.

    Raises
    ------
    UnverifiableError
        If it is a dataset of another program, which may be chosen, without a digest: nothing in it can be compared,
        saved or indexed.
    """
    path = look.path
    corpus = code.open(FoundFile(path=path, verify="none", known=known, look=look))
    if corpus.foreign_dataset is not None and corpus.sha256 is None:
        corpus.close()
        facts = f"{path}: {corpus.foreign_dataset}: {NO_DIGESTS}"
        raise UnverifiableError(facts, remedy=Remedy.DIGESTS, at=path)
    return corpus


def open_damaged(path: Path, name: Path) -> BrokenFile:
    """Open a damaged or unfinished file, of the format that a name tells."""
    broken = load_format(FORMATS[backend_of_suffix(name)]).open_broken(path)
    if broken is not None:
        return broken
    corpus = open_chunks(path)
    with on_failure(corpus.close):
        return BrokenFile(corpus, corpus.digests.crc32(), "" if corpus.complete else "its writer has not finished")
