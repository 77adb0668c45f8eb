"""A corpus as records: the batches of a store as they are or relaid, or arrays whose records are cut and shuffled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zb_hdf5.converters.array_file import ArrayFile
from zb_hdf5.converters.array_source import ArraySource, array_options
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import DEFAULT_BATCH_SIZE, STREAM
from zb_hdf5.converters.foreign_datasets import description_of, require_all_fields, with_fields
from zb_hdf5.converters.option import Role
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.source_documents import told_documents
from zb_hdf5.converters.store_source import open_stores
from zb_hdf5.converters.stream_source import StreamSource
from zb_hdf5.errors import ArgumentError, ConvertError, conversion_call
from zb_hdf5.files.field_files import require_one_dtype
from zb_hdf5.files.named_splits import named_splits, train_first
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
    return _of_splits(files, settings, build, array_options(settings))


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
    return _of_splits(files, settings, build, options)


def _require_documents(path: Path, target: str, column: Column) -> None:
    """Raise `ConvertError` unless each record may become a document of another trainer, or a field tells documents."""
    is_told = any(name in column.fields for name in DOCUMENTS_COLUMNS)
    if column.meta.layout == STREAM_LAYOUT or (target == STREAM and not is_told):
        raise ConvertError(
            f"{path}: expected documents for {target}, found a dataset of ids without them: convert it to batches: "
            f"{conversion_call(path, 'hdf5', dataset=column.name)}"
        )


def _of_splits(
    files: Sequence[ArrayFile], settings: Settings, build: Callable[..., ArraySource], options: dict[str, Any]
) -> ArraySource:
    """Return the batches of some files, each split that their names tell by itself.

    Parameters
    ----------
    files
        The arrays.
    build
        Makes a source of some files, with options.
    options
        Those of an `ArraySource`.
    """
    told: list[str] = []
    if not settings.input.is_one_split:
        told = named_splits([file.path for file in files], settings.paths)
    splits = train_first(told)
    if len(splits) > 1:
        _require_place_for_splits(splits, settings, options["val_fraction"])
        by_split = sorted(zip(files, told, strict=True), key=lambda each: splits.index(each[1]))
        files = [file for file, _ in by_split]
        options = {**options, "told": [split for _, split in by_split]}
    require_one_dtype([(file.path, file.dtype) for file in files], settings.paths)
    return build(files, **options)


def _require_place_for_splits(splits: list[str], settings: Settings, val_fraction: float) -> None:
    """Raise `ArgumentError` if a target has no splits, or another one is asked for."""
    target = settings.target
    known = " and ".join(splits)
    if val_fraction:
        raise ArgumentError(
            f"the source has the splits {known} already: leave out val_fraction, or pass split='all'",
            options=["val_fraction", "split"],
        )
    noun = ""
    row = batch_format(target.format)
    if target.live:
        noun = "a live store has"
    elif target.is_one_file:
        noun = "one file has"
    elif row is not None and not row.holds_batches:
        noun = f"{target.format} files have"
    if noun:
        raise ArgumentError(
            f"{settings.paths[0]}: has the splits {known}, and {noun} none: name the files of one, or pass split='all'",
            options=["split"],
        )
