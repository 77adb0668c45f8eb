"""HDF5 files of other programs as a source: datasets of batches, records or streams, in one file or in many."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zb_hdf5.converters.array_source import ArrayFile, ArraySource, array_options
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import DEFAULT_BATCH_SIZE, STREAM
from zb_hdf5.converters.options import Settings
from zb_hdf5.converters.split_arrays import arrays_of_splits
from zb_hdf5.converters.stream_source import StreamSource, require_no_unfit
from zb_hdf5.errors import ConvertError, conversion_call
from zb_hdf5.files.field_files import ids_at
from zb_hdf5.files.listing import files_at, listed, require_named_once
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.foreign import warn_of_mask
from zb_hdf5.formats.format_row import HDF5_SUFFIXES
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_tokens import open_stored
from zb_hdf5.formats.inspection import find_foreign_column, is_ours
from zb_hdf5.formats.row_documents import DOCUMENTS_COLUMNS
from zb_hdf5.notes import note
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import BATCHES_LAYOUT, STREAM_LAYOUT
from zb_hdf5.store.both_formats import stores_by_format
from zb_hdf5.store.format_list import batch_format
from zb_hdf5.store.index import find_index
from zb_hdf5.store.recognition import backend_in
from zb_hdf5.store.verify import require_digests


def is_of_others(look: Look) -> bool:
    """Return whether a path is an HDF5 file of another program, or a folder of such files that is no store."""
    path = look.path
    if not look.is_dir:
        return backend_in(look) == "hdf5" and not is_ours(path)
    if look.is_far or find_index(path) is not None or stores_by_format(path):
        return False
    found = listed(path, *HDF5_SUFFIXES).files
    return bool(found) and not is_ours(found[0])


class ForeignArray(ArrayFile):
    """A dataset of another program as one array of tokens.

    Parameters
    ----------
    column
        The dataset, as a look into its file has found it.
    """

    def __init__(self, column: Column) -> None:
        meta = column.meta
        is_stream = meta.layout == STREAM_LAYOUT
        shape = (column.num_tokens,) if is_stream else (column.num_tokens // meta.seq_len, meta.seq_len)
        fields = {name: ForeignArray(each) for name, each in column.fields.items()}
        super().__init__(column.path, shape, column.dtype, fields)
        self._column = column

    @property
    def reads_alone(self) -> bool:
        return self._column.extents is not None

    def open(self) -> Tokens:
        is_plain = self._column.extents is not None and not isinstance(self.path, RemotePath)
        return open_stored(self._column, "pread" if is_plain else "auto")


class ForeignSource(ArraySource):
    """Batches of records from datasets of other programs, shuffled or not.

    Parameters
    ----------
    columns
        The datasets, as looks into their files have found them.
    read_as
        How they were found.
    batch_size
        Records of a batch; None: as many as the batches of the first dataset have, or 32 if it has none.
    **options
        As for `ArraySource`.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        read_as: ReadAs = AS_STORED,
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        first = columns[0]
        has_batches = first.meta.layout == BATCHES_LAYOUT and first.meta.batch_size > 1
        stored = first.meta.batch_size if has_batches else DEFAULT_BATCH_SIZE
        super().__init__(list(map(ForeignArray, columns)), "hdf5", batch_size=batch_size or stored, **options)
        self.description = {**self.description, "dataset": first.name}
        if read_as.channel is not None:
            self.description |= {"channel": read_as.channel, "field_channels": read_as.field_channels}
        if read_as.unwritten is not None:
            self.description |= {"unwritten": read_as.unwritten}
        self._with_digest = [column.path for column in columns if column.sha256 is not None]

    def check_reads(self) -> None:
        """Compare the files that have a digest with it, once: records are read from anywhere in them."""
        for path in self._with_digest:
            require_digests(path, read_as=ReadAs(self.description["dataset"]))
        self._with_digest = []


def open_foreign(paths: list[Path], settings: Settings) -> BatchSource | StreamSource:
    """Open files of other programs, and folders of them, as a conversion asks."""
    read_as = settings.input.read_as
    known = settings.looks.columns(read_as)
    if not known:  # else it was told when they were found
        warn_of_mask(read_as)
    columns = _look_at_all(ids_at(files_at(paths, *HDF5_SUFFIXES), paths), read_as, known)
    if settings.target.is_stream and columns[0].told_by:
        return _told_stream(paths, columns, settings)
    if settings.target.is_stream:
        _require_documents(paths[0], settings.target.format, columns[0])
    tokens_only = settings.target.tokens_only
    row = batch_format(settings.target.format)
    if tokens_only and (row is None or not row.tokens_only):
        columns = [_with_fields(column, DOCUMENTS_COLUMNS if settings.target.is_stream else ()) for column in columns]
    elif not tokens_only:
        _require_all_fields(columns)
    return arrays_of_splits(
        columns,
        [column.path for column in columns],
        settings,
        partial(ForeignSource, read_as=read_as),
        array_options(settings),
    )


def _told_stream(paths: list[Path], columns: list[Column], settings: Settings) -> StreamSource:
    """Return token streams as the documents that a field tells apart."""
    read_as = settings.input.read_as
    require_named_once(paths, "documents")
    at_paths = {path: settings.looks.at(path, read_as=read_as) for path in paths}
    source = StreamSource(at_paths, settings.input, settings.target.dtype)
    if settings.target.tokens_only:
        source.fields = ()
    else:
        _require_all_fields(columns)
    note(f"{columns[0].path}: field {columns[0].told_by!r} tells its documents apart")
    source.description |= {"dataset": columns[0].name, "documents": columns[0].told_by}
    return source


def _require_all_fields(columns: list[Column]) -> None:
    """Refuse values named as targets that are none, and warn of others that can be no fields."""
    for column in columns:
        require_no_unfit(column.path, column.meta)
    if left_out := sorted({name for column in columns for name in column.left_out}):
        warnings.warn(f"{columns[0].path}: left out, as they can be no fields: {', '.join(left_out)}", stacklevel=2)


def _with_fields(column: Column, names: Collection[str]) -> Column:
    """Return a column with those of its fields that are named, and no other."""
    fields = {name: each for name, each in column.fields.items() if name in names}
    meta = replace(column.meta, fields=tuple(field for field in column.meta.fields if field.name in fields))
    return column._replace(meta=meta, fields=fields)


def _require_documents(path: Path, target: str, column: Column) -> None:
    """Raise `ConvertError` unless each record may become a document of another trainer, or a field tells documents."""
    is_told = any(name in column.fields for name in DOCUMENTS_COLUMNS)
    if column.meta.layout == STREAM_LAYOUT or (target == STREAM and not is_told):
        raise ConvertError(
            f"{path}: expected documents for {target}, found a dataset of ids without them: convert it to batches: "
            f"{conversion_call(path, 'hdf5', dataset=column.name)}"
        )


def _look_at_all(files: Sequence[Path], read_as: ReadAs, known: Mapping[Path, Column]) -> list[Column]:
    """Return the dataset of each file: all have the name of the first one.

    Parameters
    ----------
    known
        The datasets that were found already.
    """
    columns: list[Column] = []
    for file in files:
        columns.append(known.get(file) or find_foreign_column(file, read_as))
        read_as = replace(read_as, dataset=columns[0].name)
    return columns
