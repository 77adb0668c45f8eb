"""A corpus as records: the batches of a store as they are or relaid, or arrays whose records are cut and shuffled."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from zb_hdf5.converters.array_file import ArrayFile
from zb_hdf5.converters.array_source import ArraySource, array_options
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import DEFAULT_BATCH_SIZE, STREAM
from zb_hdf5.converters.foreign_datasets import description_of, require_all_fields, with_fields
from zb_hdf5.converters.option import Role
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.source_documents import told_documents
from zb_hdf5.converters.split_arrays import arrays_of_splits
from zb_hdf5.converters.store_source import open_stores
from zb_hdf5.converters.stream_source import StreamSource
from zb_hdf5.errors import ConvertError, conversion_call
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.row_documents import DOCUMENTS_COLUMNS
from zb_hdf5.spec import BATCHES_LAYOUT, STREAM_LAYOUT
from zb_hdf5.store.format_list import HDF5, batch_format


def open_as_records(paths: list[Path], settings: Settings) -> BatchSource | StreamSource:
    """Open the records at some paths, as a conversion asks."""
    if Role.ARRAYS not in settings.roles:
        return open_stores(paths, settings)
    if Role.FOREIGN in settings.roles:
        return _of_other_programs(paths, settings)
    how = settings.input
    name, found = settings.looks.flat(paths, settings.source_format, how.read_as)
    files = [ArrayFile(each, settings.looks.open_look(each.path)) for each in found]
    build = partial(ArraySource, name=name, described=how.headerless, suspects=how.suspects)
    return arrays_of_splits(files, settings, build, array_options(settings))


def _of_other_programs(paths: list[Path], settings: Settings) -> BatchSource | StreamSource:
    """Open HDF5 files of other programs, and folders of them."""
    read_as = settings.input.read_as
    columns = settings.looks.datasets(paths, read_as)
    target = settings.target
    first = columns[0]
    if target.is_stream and first.told_by:
        return told_documents(paths, columns, settings)
    if target.is_stream:
        _require_documents(paths[0], target.format, first)
    row = batch_format(target.format)
    if target.tokens_only and (row is None or not row.tokens_only):
        columns = [with_fields(column, DOCUMENTS_COLUMNS if target.is_stream else ()) for column in columns]
    elif not target.tokens_only:
        require_all_fields(columns)
    options = array_options(settings)
    if options["batch_size"] is None:
        has_batches = first.meta.layout == BATCHES_LAYOUT and first.meta.batch_size > 1
        options["batch_size"] = first.meta.batch_size if has_batches else DEFAULT_BATCH_SIZE
    build = partial(ArraySource, name=HDF5, described=description_of(first, read_as))
    files = [ArrayFile(FlatFacts.of(column), settings.looks.open_look(column.path)) for column in columns]
    return arrays_of_splits(files, settings, build, options)


def _require_documents(path: Path, target: str, column: Column) -> None:
    """Raise `ConvertError` unless each record may become a document of another trainer, or a field tells documents."""
    is_told = any(name in column.fields for name in DOCUMENTS_COLUMNS)
    if column.meta.layout == STREAM_LAYOUT or (target == STREAM and not is_told):
        raise ConvertError(
            f"{path}: expected documents for {target}, found a dataset of ids without them: convert it to batches: "
            f"{conversion_call(path, 'hdf5', dataset=column.name)}"
        )
