"""The paths of a source, each of which is looked at once: what a look has found is what is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zb_hdf5.errors import ArgumentError, ZbError
from zb_hdf5.files.listing import listed
from zb_hdf5.files.look import Look
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.format_row import HDF5_SUFFIXES
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.inspection import is_ours
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.both_formats import stores_by_format
from zb_hdf5.store.format_list import flat_format
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.index import find_index
from zb_hdf5.store.recognition import backend_in
from zb_hdf5.store.store_corpus import StoreCorpus, require_stream


class SourcePaths:
    """The looks at the paths of a source. Not thread-safe."""

    def __init__(self) -> None:
        self._looks: list[tuple[Path, ReadAs, Found | ZbError]] = []

    def at(self, path: Path, *, backend: str = "auto", read_as: ReadAs = AS_STORED, look: Look | None = None) -> Found:
        """Return what is at a path, whatever the splits of its files are. Raises as `found_at`.

        Parameters
        ----------
        backend
            The format that is asked for, or "auto".
        read_as
            How files are read that do not tell it themselves.
        look
            A look at the path that is under way; None: begin one.
        """
        for known, how, found in self._looks:
            if (known, how) == (path, read_as):
                if isinstance(found, ZbError):
                    raise found
                if backend in ("auto", found.backend):
                    return found
        try:
            made = found_at(path, backend=backend, split=None, read_as=read_as, look=look)
        except ZbError as error:
            self._looks.append((path, read_as, error))
            raise
        self._looks.append((path, read_as, made))
        return made

    def flat(self, paths: Sequence[Path], backend: str, read_as: ReadAs) -> tuple[str, list[FlatFacts]]:
        """Return the format of token files at some paths, and the facts of all of them, in order.

        Raises
        ------
        ArgumentError
            If a path has files of another format than the first one, or that has none of another trainer.
        """
        at_paths = [self.at(path, backend=backend, read_as=read_as) for path in paths]
        name = at_paths[0].backend
        if flat_format(name) is None:
            raise ArgumentError(f"{paths[0]}: expected token files of another trainer, found others")
        for each in at_paths:
            if each.backend != name:
                raise ArgumentError(f"{each.path}: expected {name!r} files as {paths[0]}, found {each.backend!r}")
        return name, [facts for each in at_paths for facts in each.facts]

    def is_foreign_hdf5(self, look: Look, read_as: ReadAs) -> bool:
        """Return whether a path is an HDF5 file of another program, or a folder of such files that is not a store."""
        try:
            return self.at(look.path, read_as=read_as, look=look).foreign_dataset is not None
        except ZbError:  # whoever opens it says so
            return _has_others(look)

    def columns(self, read_as: ReadAs) -> dict[Path, Column]:
        """Return the datasets of HDF5 files of other programs that were found so, by their files."""
        found = [each for _, how, each in self._looks if how == read_as and isinstance(each, Found)]
        columns = [each.column for each in found] + [facts.column for each in found for facts in each.facts]
        return {column.path: column for column in columns if column is not None and column.is_foreign}


def _has_others(look: Look) -> bool:
    """Return whether a path, which cannot be opened as it is asked for, has HDF5 files of another program."""
    path = look.path
    if not look.is_dir:
        return backend_in(look) == "hdf5" and not is_ours(path)
    if look.is_far or find_index(path) is not None or stores_by_format(path):
        return False
    found = listed(path, *HDF5_SUFFIXES).files
    return bool(found) and not is_ours(found[0])


def stream_of(found: Found, split: str | None, verify: str = "auto") -> StoreCorpus:
    """Open a token stream, or one split of it, of a path whose files were all found. Raises as `open_corpus`."""
    return require_stream(corpus_of(replace(found.of_split(split), verify=verify)))
