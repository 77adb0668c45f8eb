"""The paths of a source, each of which is looked at once: what a look has found is what is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.errors import ArgumentError, FormatError
from zb_hdf5.files.field_files import ids_at
from zb_hdf5.files.listing import files_at
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import ALL_SPLITS, split_named
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.foreign import warn_of_mask
from zb_hdf5.formats.format import NOT_IN_PLACE, Found
from zb_hdf5.formats.format_row import HDF5_SUFFIXES
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.inspection import find_foreign_column
from zb_hdf5.formats.npy import NpyArrays, npy_header
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.format_list import FORMATS, HDF5, NPY, flat_format
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.found_source import found_hdf5, found_source
from zb_hdf5.store.opened_path import OpenedPath
from zb_hdf5.store.recognition import flat_files
from zb_hdf5.store.store_corpus import StoreCorpus, require_stream
from zb_hdf5.store.verify import require_digests


class SourcePaths:
    """The looks at the paths of a source. Not thread-safe."""

    def __init__(self) -> None:
        self._found: dict[Path, list[tuple[ReadAs, Found]]] = {}
        self._open: dict[Path, Look] = {}
        self._first: Look | None = None  # which has the looks at other folders
        self._begun: list[Look] = []  # those that `opening` ends
        self._ends = ExitStack()

    def look_of(self, path: Path) -> Look:
        """Return the look at a path. That at a folder is kept, so that it is listed once, and so is the first one.

        A look at another file is a new one: thousands of files may be named.
        """
        first = self._first = self._first or Look(path)
        return first.of(path) if path == first.path or path.is_dir() else Look(path)

    def at(self, path: Path, *, backend: str = "auto", read_as: ReadAs = AS_STORED) -> Found:
        """Return the findings at a path that is read in place, of all its splits. Raises as `found_at`.

        Parameters
        ----------
        backend
            The format that is asked for, or "auto".
        read_as
            How files are read that do not tell it themselves.
        """
        for how, found in self._found.get(path, ()):
            if how == read_as and backend in ("auto", found.backend):
                return found
        with self.look_of(path) as look:
            found = found_at(path, backend=backend, split=None, read_as=read_as, look=look)
            return self._keep(path, read_as, found.kept_open(look))

    def keep_opened(self, path: Path, corpus: Corpus) -> dict[str, Any]:
        """Look at the path of a corpus as it was opened, and keep it; return the options of a conversion for it.

        Digests that were made of its files are compared once.

        Raises
        ------
        FormatError
            If the path has other tokens by now.
        """
        look = self.look_of(path)
        with look:
            found = found_at(path, look=look, **{**corpus.opened.how, "verify": "auto"})
        with corpus_of(found) as now:
            if not corpus.same_as(now):
                raise FormatError(f"{path}: was replaced, or has grown: its tokens are not the tokens of the corpus")
        if found.read_as.digests is not None:
            require_digests(found.path, found.split, found.read_as, OpenedPath(look=look))
        read_as = replace(found.read_as, digests=None)
        options = read_as.given
        if found.foreign_dataset is None:
            options.pop("axes", None)  # of arrays, whose records are known
        if found.facts and split_named(found.split) is None:
            options["split"] = ALL_SPLITS  # as it was opened: files of a store keep the splits of their shards
        self._keep(path, replace(read_as, axes=options.get("axes")), replace(found, read_as=read_as))
        return options

    def source(self, path: Path, conversion: Conversion) -> Found:
        """Return the findings at the first path of a source, of any format, or of HDF5 files if these are asked for.

        Raises as `found_source`.
        """
        if path in self._found:
            return self._found[path][0][1]
        read_as = _read_as(conversion)
        with ExitStack() as stack:
            look = stack.enter_context(self.look_of(path))
            stack.enter_context(look.keeping_handles())
            if conversion.source_format == HDF5:
                found = found_hdf5(look, read_as)
            else:
                asked = {name: getattr(conversion, name) for name in ("tokenizer", "ids_column", "offsets")}
                found = found_source(look, read_as, **asked)
            if found.layout != NOT_IN_PLACE:
                return self._keep(path, found.read_as, found.kept_open(look))
            self._begun.append(look)
            self._ends.push(stack.pop_all())
            return found

    def begun_at(self, path: Path) -> Look:
        """Return the look at a path that goes on until the source is open: `opening` ends it."""
        look = self.look_of(path)
        if look not in self._begun:
            self._begun.append(self._ends.enter_context(look))
        return look

    @contextmanager
    def opening(self) -> Iterator[None]:
        """End the looks of `source` and `begun_at` with a block in which the source is opened.

        Raises
        ------
        FormatError
            If a file that they have read has been replaced meanwhile.
        """
        with self._ends:
            yield
            for look in self._begun:
                look.require_unreplaced()
        self._begun.clear()

    def rows(self, paths: Sequence[Path], name: str) -> list[Found]:
        """Return the findings at the paths of rows of a format: the first one has the look by which it was found."""
        first, *others = paths
        found = Found(first, name, NOT_IN_PLACE, look=self.begun_at(first))
        return [found, *(Found(path, name, NOT_IN_PLACE) for path in others)]

    def open_look(self, file: Path) -> Look | None:
        """Return the look at a file that was found, if it is open for whoever reads it first."""
        return self._open.get(file)

    def _keep(self, path: Path, read_as: ReadAs, found: Found) -> Found:
        self._found.setdefault(path, []).append((read_as, found))
        if found.look is not None:
            self._open.setdefault(found.look.path, found.look)
        return found

    def _arrays(self, paths: Sequence[Path]) -> list[FlatFacts]:
        """Return the facts of `.npy` files, of those that are not read in place too. Raises as `NpyArrays.facts_once`.

        Streams and records of several lengths and dtypes may stand beside each other.
        """
        found = self._facts_at(paths)
        if found:
            return [*found]
        npy = NpyArrays(FORMATS[NPY])
        facts = []
        for path in ids_at(files_at(map(self.look_of, paths), *npy.suffixes), paths):
            with Look(path) as look:
                facts.append(npy.facts_once(look))
        return facts

    def _facts_at(self, paths: Sequence[Path]) -> tuple[FlatFacts, ...]:
        """Return the facts of the files at the only path, if these were found: of a corpus the files of its split."""
        known = self._found.get(paths[0], ()) if len(paths) == 1 else ()
        return next((found.facts for _, found in known), ())

    def flat(self, paths: Sequence[Path], backend: str, read_as: ReadAs) -> tuple[str, list[FlatFacts]]:
        """Return the format of token files at some paths, and the facts of all of them, in order.

        Arrays need not be read in place. Raises of these as `NpyArrays.facts_once`.

        Raises
        ------
        ArgumentError
            If a path has files of another format than the first one, or that has none of another trainer.
        """
        if backend == NPY:
            return NPY, self._arrays(paths)
        at_paths = [self.at(path, backend=backend, read_as=read_as) for path in paths]
        name = at_paths[0].backend
        if flat_format(name) is None:
            raise ArgumentError(f"{paths[0]}: expected token files of another trainer, found others")
        for each in at_paths:
            if each.backend != name:
                raise ArgumentError(f"{each.path}: expected {name!r} files as {paths[0]}, found {each.backend!r}")
        return name, [facts for each in at_paths for facts in each.facts]

    def has_records(self, path: Path) -> bool:
        """Return whether the first `.npy` file at a path is an array of two axes."""
        look = self.begun_at(path)
        files = flat_files(NPY, look)
        return bool(files) and len(npy_header(look.of(files[0]))[0]) == 2

    def lack_documents(self, paths: Sequence[Path], name: str, conversion: Conversion) -> bool:
        """Return whether the files at some paths have no header, and all lack the file of their documents, and fields.

        A mask that is left beside them would be lost with the documents.
        """
        read_as = _read_as(conversion)
        if not read_as.lacks_header:
            return False
        _, files = self.flat(paths, name, read_as)
        return all(each.num_documents is None and not each.fields for each in files)

    def datasets(self, paths: Sequence[Path], read_as: ReadAs) -> list[Column]:
        """Return the dataset of each HDF5 file of another program: all have the name of the first one.

        Raises as `ids_at`, and as `find_foreign_column` of a file that was not found yet.
        """
        found = [each for known in self._found.values() for how, each in known if how == read_as]
        columns = [each.column for each in found] + [facts.column for each in found for facts in each.facts]
        known = {column.path: column for column in columns if column is not None and column.is_foreign}
        if not known:  # else it was told when they were found
            warn_of_mask(read_as)
        files = [facts.path for facts in self._facts_at(paths)]
        if not files:
            files = ids_at(files_at(map(self.look_of, paths), *HDF5_SUFFIXES), paths)
        datasets: list[Column] = []
        for file in files:
            datasets.append(known.get(file) or find_foreign_column(file, read_as))
            read_as = replace(read_as, dataset=datasets[0].name)
        return datasets


def _read_as(conversion: Conversion) -> ReadAs:
    """Return how a conversion asks for files to be read; options that contradict each other are refused later."""
    try:
        return conversion.read_as
    except ArgumentError:
        return AS_STORED


def stream_of(found: Found, split: str | None, verify: str = "auto") -> StoreCorpus:
    """Open a token stream, or one split of it, of a path whose files were all found. Raises as `open_corpus`."""
    return require_stream(corpus_of(replace(found.of_split(split), verify=verify)))
