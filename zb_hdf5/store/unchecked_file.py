"""One file, whole or damaged, as its batches or the chunks of its stream: its magic bytes tell its format."""

from __future__ import annotations

from pathlib import Path

from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import on_failure
from zb_hdf5.formats.broken_file import BrokenFile
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.format_list import FORMATS, backend_of_suffix, load_format
from zb_hdf5.store.recognition import detect_backend


def open_chunks(path: Path, read_as: ReadAs = AS_STORED) -> Corpus:
    """Open a file as its batches, or as the chunks of a stream. No read is checked. Raises as `Format.open_chunks`."""
    with Look(path) as look:
        return load_format(FORMATS[detect_backend(look)], read_as).open_chunks(look)


def open_damaged(path: Path, name: Path) -> BrokenFile:
    """Open a damaged or unfinished file, of the format that a name tells."""
    broken = load_format(FORMATS[backend_of_suffix(name)]).open_broken(path)
    if broken is not None:
        return broken
    corpus = open_chunks(path)
    with on_failure(corpus.close):
        return BrokenFile(corpus, corpus.digests.crc32(), "" if corpus.complete else "its writer has not finished")
