"""Files of other trainers whose ids follow each other, as arrays: records are cut from them, or documents."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zb_hdf5.converters.array_source import array_options
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import InputOptions
from zb_hdf5.converters.npy_source import ArrayKind, CutSource, Header, NpySource
from zb_hdf5.converters.options import Settings
from zb_hdf5.converters.routes import told_splits
from zb_hdf5.converters.split_arrays import arrays_of_splits
from zb_hdf5.errors import ArgumentError
from zb_hdf5.field import Field
from zb_hdf5.formats.flat_tokens import FlatTokens
from zb_hdf5.spec import NOT_KNOWN
from zb_hdf5.store.format_list import flat_format
from zb_hdf5.store.store_corpus import StoreCorpus


class FlatFiles(NamedTuple):
    """The files of one flat format at some paths, as arrays.

    Attributes
    ----------
    files
        The files, in order.
    kind
        How their headers are read.
    fields
        The fields of the first one.
    """

    files: list[Path]
    kind: ArrayKind
    fields: tuple[Field, ...]


def flat_files_at(paths: list[Path], backend: str, settings: Settings) -> FlatFiles | None:
    """Return the files of a flat format at some paths; None if the first path holds none.

    Parameters
    ----------
    backend
        The format that is asked for, or "auto".
    """
    read_as = settings.input.read_as
    at_paths = [settings.looks.at(path, backend=backend, read_as=read_as) for path in paths]
    name = at_paths[0].backend
    flat = flat_format(name, read_as)
    if flat is None:
        return None
    for each in at_paths:
        if each.backend != name:
            raise ArgumentError(f"{each.path}: expected {name!r} files as {paths[0]}, found {each.backend!r}")
    found = [each for here in at_paths for each in here.facts]
    kind = ArrayKind(name, flat.suffixes[0], partial(_header, {each.path: each for each in found}))
    return FlatFiles([each.path for each in found], kind, found[0].fields)


def _header(found: Mapping[Path, FlatTokens], path: Path) -> Header:
    """Return the facts of a flat file as those of an array."""
    facts = found[path]
    return (facts.num_tokens,), False, facts.dtype, facts.byte_offset


def open_flat(paths: list[Path], settings: Settings) -> BatchSource:
    """Open files without documents as records, as a conversion asks."""
    options = settings.input
    found = flat_files_at(paths, settings.source_format, settings)
    if found is None:
        raise ArgumentError(f"{paths[0]}: expected token files of another trainer, found others")
    build = partial(_suspected, found.kind, options)
    return arrays_of_splits(found.files, found.files, settings, build, array_options(settings))


def _suspected(kind: ArrayKind, options: InputOptions, files: list[Path], **of_arrays: Any) -> NpySource:
    """Return some files as records, whose ids may prove the names of their dtype wrong."""
    source = NpySource(files, kind=kind, **of_arrays)
    source.suspects = options.suspects
    source.description |= options.headerless
    return source


def without_documents(stream: StoreCorpus) -> str:
    """Return the words for the first file of a stream that lacks the file of its documents; "": of another format."""
    flat = flat_format(stream.backend)
    if flat is None or not flat.documents_suffix:
        return ""
    counts = list(stream.index.table.values["document_count"])
    name = stream.files[counts.index(NOT_KNOWN)].name
    return f" in {name}, which has no {flat.documents_suffix} beside it"


def cut_flat(found: FlatFiles, settings: Settings) -> CutSource:
    """Return files without documents as those that a boundary token cuts."""
    options = settings.input
    source = CutSource(found.files, options, settings.target.dtype, found.kind)
    if found.fields and not settings.target.tokens_only:
        raise ArgumentError(
            f"{found.files[0]}: has the field {found.fields[0].name}, which is left behind where a boundary token cuts "
            "documents: pass tokens_only, or restore the file of the documents",
            options=["tokens_only"],
        )
    source.splits = told_splits(source, settings)
    source.suspects = options.suspects
    source.description |= options.headerless
    return source
