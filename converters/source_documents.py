"""A corpus as documents: packed where they lie, kept as a stream, or cut out of arrays at a boundary token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

from zb_hdf5.converters.conversion import STREAM
from zb_hdf5.converters.cut_source import CutSource
from zb_hdf5.converters.foreign_datasets import require_all_fields
from zb_hdf5.converters.option import Role
from zb_hdf5.converters.packed_batches import PackedBatches, open_packed
from zb_hdf5.converters.piece_source import PieceSource
from zb_hdf5.converters.routes import told_splits
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.source_paths import stream_of
from zb_hdf5.converters.stream_source import BOUNDED_TOKENS, StreamSource, require_no_unfit, without_documents
from zb_hdf5.errors import ArgumentError, ConvertError, FormatError, Remedy
from zb_hdf5.files.listing import require_named_once
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.notes import note
from zb_hdf5.store.format_list import flat_format, row_named

#: The cure for records where a stream is expected.
_TAKES_RECORDS: Final = "npy-to-hdf5 takes records"


def open_as_documents(paths: list[Path], settings: Settings) -> DocumentSource | AbstractContextManager[PackedBatches]:
    """Open the documents at some paths, as a conversion asks."""
    if Role.STREAM in settings.roles:
        return open_packed(paths, settings)
    require_named_once(paths, "documents")
    options = settings.input
    if options.boundary_token_id is not None:
        name = settings.source_format
        if name == STREAM:  # any format that is read in place: a look tells which
            name = settings.looks.at(paths[0], read_as=options.read_as).backend
        if flat_format(name) is not None:
            name, files = settings.looks.flat(paths, name, options.read_as)
            if any(file.num_documents is None for file in files):
                return _cut(files, name, settings)
    return _kept(paths, settings)


def _cut(found: Sequence[FlatFacts], name: str, settings: Settings) -> CutSource:
    """Return flat files, some of which tell no documents apart, as documents that a boundary token cuts."""
    _require_streams(found)
    options = settings.input
    path = found[0].path
    if settings.bound_bytes is not None:
        raise ArgumentError(
            f"{path}: memory bounds documents whose number is known before they are cut: leave it out, or "
            "convert to a stream first",
            options=["memory"],
        )
    fields = [field.name for file in found for field in file.fields]
    if fields and not settings.target.tokens_only:
        raise ArgumentError(
            f"{path}: has the field {fields[0]}, which is left behind where a boundary token "
            "cuts documents: pass tokens_only, or restore the file of the documents",
            options=["tokens_only"],
        )
    source = CutSource(found, name, options, settings.target.dtype)
    source.splits = told_splits(source, settings)
    return source


def _require_streams(files: Iterable[FlatFacts]) -> None:
    """Raise `ConvertError` for a file that holds records."""
    for file in files:
        if file.record_tokens is not None:
            raise ConvertError(
                f"{file.path}: expected a 1-D stream of tokens, found shape {file.shape}; {_TAKES_RECORDS}"
            )


def _stream_at(path: Path, backend: str, settings: Settings) -> Found:
    """Return the findings at a path; `ConvertError` for short records, whose axes help no stream."""
    try:
        return settings.looks.at(path, backend=backend, read_as=settings.input.read_as)
    except FormatError as error:
        if error.remedy is not Remedy.RECORD_AXES:
            raise
        raise ConvertError(f"{error.facts}; {_TAKES_RECORDS}") from None


def _kept(paths: list[Path], settings: Settings) -> StreamSource:
    """Return streams as documents that are kept, or as pieces where neither they nor the target tell documents."""
    options = settings.input
    tokens_only = settings.target.tokens_only
    backend = settings.source_format if flat_format(settings.source_format) is not None else "auto"
    at_paths = {path: _stream_at(path, backend, settings) for path in paths}
    for found in at_paths.values():
        _require_streams(found.facts)
    streams = [stream_of(replace(found, look=None), None) for found in at_paths.values()]  # closed before it is read
    unknown = [stream for stream in streams if not stream.has_documents]
    for stream in streams:
        stream.close()
        if not tokens_only:
            require_no_unfit(stream.path, stream.index.meta)
    row = row_named(settings.target.format)
    holds_documents = row is None or row.holds_documents or row.holds_batches
    if unknown and holds_documents and not tokens_only:
        raise ArgumentError(
            f"{unknown[0].path}: tells no documents apart{without_documents(unknown[0])}: pass boundary_token_id, the "
            "token between them, or tokens_only to take each file as one document",
            options=["boundary_token_id", "tokens_only"],
        )
    read_tokens = None if settings.bound_bytes is None else BOUNDED_TOKENS
    kind = PieceSource if unknown and not holds_documents else StreamSource
    return kind(at_paths, options, settings.target.dtype, read_tokens=read_tokens)


def told_documents(paths: list[Path], columns: Sequence[Column], settings: Settings) -> StreamSource:
    """Return streams of other programs as the documents that a field tells apart.

    Parameters
    ----------
    columns
        The datasets of their files.
    """
    require_named_once(paths, "documents")
    at_paths = {path: settings.looks.at(path, read_as=settings.input.read_as) for path in paths}
    source = StreamSource(at_paths, settings.input, settings.target.dtype)
    if settings.target.tokens_only:
        source.fields = ()
    else:
        require_all_fields(columns)
    note(f"{columns[0].path}: field {columns[0].told_by!r} tells its documents apart")
    source.description |= {"dataset": columns[0].name, "documents": columns[0].told_by}
    return source
