"""The paths of a source, each of which is looked at once: what a look has found is what is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zb_hdf5.errors import ZbError
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.store_corpus import StoreCorpus, require_stream


class SourcePaths:
    """The looks at the paths of a source. Not thread-safe."""

    def __init__(self) -> None:
        self._looks: list[tuple[Path, ReadAs, Found | ZbError]] = []

    def at(self, path: Path, *, backend: str = "auto", read_as: ReadAs = AS_STORED) -> Found:
        """Return what is at a path, whatever the splits of its files are. Raises as `found_at`.

        Parameters
        ----------
        backend
            The format that is asked for, or "auto".
        read_as
            How files are read that do not tell it themselves.
        """
        for known, how, found in self._looks:
            if (known, how) == (path, read_as):
                if isinstance(found, ZbError):
                    raise found
                if backend in ("auto", found.backend):
                    return found
        try:
            made = found_at(path, backend=backend, split=None, read_as=read_as)
        except ZbError as error:
            self._looks.append((path, read_as, error))
            raise
        self._looks.append((path, read_as, made))
        return made

    def columns(self, read_as: ReadAs) -> dict[Path, Column]:
        """Return the datasets of HDF5 files of other programs that were found so, by their files."""
        found = [each for _, how, each in self._looks if how == read_as and isinstance(each, Found)]
        columns = [each.column for each in found] + [facts.column for each in found for facts in each.facts]
        return {column.path: column for column in columns if column is not None and column.is_foreign}


def stream_of(found: Found, split: str | None, verify: str = "auto") -> StoreCorpus:
    """Open a token stream, or one split of it, of a path whose files were all found. Raises as `open_corpus`."""
    return require_stream(corpus_of(replace(found.of_split(split), verify=verify)))
