"""The settings of a conversion: the options that were asked for, resolved once, before anything is opened."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import (
    READ_AS,
    STREAM,
    WHOLE,
    Conversion,
    InputOptions,
    LayoutOptions,
    OutputOptions,
    WorkOptions,
    options_of,
)
from zb_hdf5.converters.likeness import options_like
from zb_hdf5.converters.option import Role, Taking
from zb_hdf5.converters.parts_of_rows import refuse_parts_of_rows
from zb_hdf5.converters.settings import Settings, Target, resolved_as
from zb_hdf5.converters.source_paths import SourcePaths
from zb_hdf5.converters.sources import (
    FOREIGN_HDF5,
    RECORDS,
    STORED_HDF5,
    WITHOUT_DOCUMENTS,
    Source,
    may_lack_documents,
    refuse_unused_options,
    source_named,
    target_names,
    target_of,
)
from zb_hdf5.errors import conversion_call
from zb_hdf5.files.listing import files_left_out
from zb_hdf5.files.paths import RemotePath, any_path, local_path
from zb_hdf5.files.publishing import require_name, require_present
from zb_hdf5.files.urls import without_secrets
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.document_source import missing_members
from zb_hdf5.formats.format import NOT_IN_PLACE, Found
from zb_hdf5.spec import MEGATRON_INDEX_SUFFIX, STREAM_LAYOUT, UPLOAD_DIGITS, codec_named
from zb_hdf5.store.format_list import (
    FORMATS,
    HDF5,
    INSTALLED,
    NPY,
    add_installed,
    batch_formats,
    document_targets,
    flat_format,
    format_named,
    known_formats,
    row_named,
)
from zb_hdf5.store.recognition import named_by_prefix
from zb_hdf5.trainers.installed_formats import with_notes

#: Endings of files and folders of formats that are never written.
OTHER_SUFFIXES: Final = frozenset(
    (
        *(".zarr", ".safetensors", ".npz", ".pt", ".pth", ".pkl", ".csv", ".tsv", ".json", ".jsonl", ".txt", ".mds"),
        *(".tar", ".zip", ".gz", ".zst", ".bz2", ".xz", ".tfrecord", ".array_record", ".feather", ".db", ".sqlite"),
    )
)
#: The format whose files of documents are named for a target.
MEGATRON: Final = "megatron"
#: The options that a corpus was opened with, as arguments.
FIXED_BY_CORPUS: Final = frozenset((*READ_AS, "split"))
#: The roles of a source that is open already: which of their options matter depends on it.
_OF_OPEN_SOURCE: Final = (Role.ARRAYS, Role.TEXTS, Role.HELD_OUT, Role.DOCUMENTS, Role.ROWS, Role.ANY)


def resolved(conversion: Conversion) -> tuple[Settings, Callable[[], Any]]:
    """Return the settings of a conversion, and a function that opens its source, or a context manager of it.

    Raises
    ------
    ArgumentError
        If an option has a value that it cannot have, or contradicts another one, or has no use for the source.
    NotFoundError
        If a source is not there.
    """
    destination = any_path(conversion.destination)
    target = target_of(destination) if conversion.target == "auto" else conversion.target
    if target not in target_names():
        add_installed()
    if target not in target_names():
        unknown = f"target must be one of auto, {', '.join(target_names())}, found {target!r}"
        raise with_notes(ArgumentError(unknown, options=["target"]), INSTALLED.notes)
    conversion = conversion.changed(destination=destination, target=target)
    conversion.require_possible()
    source = conversion.source
    if isinstance(source, Corpus):
        return _of_corpus(source, conversion)
    paths = _paths_of(source)
    if paths:
        return _of_paths(paths, conversion, SourcePaths())
    is_of_documents = not missing_members(source)
    known = options_of((Role.ROWS, Role.ANY) if is_of_documents else (Role.ANY,))
    conversion, like = _options_like(conversion, known)
    settings = _settings([], conversion, _OF_OPEN_SOURCE, like, is_of_documents, SourcePaths())
    if is_of_documents:
        refuse_parts_of_rows(conversion, None)
    return settings, lambda: source


def _of_corpus(corpus: Corpus, conversion: Conversion) -> tuple[Settings, Callable[[], Any]]:
    """Return the settings of a conversion of the path of a corpus, read as it was opened, and a function to open it."""
    opened = corpus.opened
    fixed = sorted(conversion.given & FIXED_BY_CORPUS)
    if conversion.source_format != "auto":
        fixed = ["source_format", *fixed]
    if fixed:
        raise ArgumentError(
            f"{corpus.path}: {' and '.join(fixed)}: chosen when a corpus is opened: pass it to open_corpus, or pass "
            "the path to convert",
            options=fixed,
        )
    if corpus.added_sets:
        raise ArgumentError(
            f"{corpus.path}: has the field set {corpus.added_sets[0]} of with_fields, which a conversion does not "
            "write: pass the corpus without it; sets that lie with its tokens are copied with them",
        )
    path = named_by_prefix(any_path(opened.path))
    looks = SourcePaths()
    options = looks.keep_opened(path, corpus)
    return _of_paths([path], conversion.changed(source=path, **options), looks)


def _of_paths(paths: list[Path], conversion: Conversion, looks: SourcePaths) -> tuple[Settings, Callable[[], Any]]:
    """Return the settings of a conversion of files, and a function that opens them.

    Parameters
    ----------
    looks
        Keeps what is found at the paths, and has what is known.
    """
    for path in paths:
        require_present(path)
    name, kind = _taken(paths, conversion, looks)
    if len(paths) > 1 and not kind.several:
        raise ArgumentError(f"source: expected one file or store of ours, found {len(paths)}: convert each by itself")
    refuse_unused_options(looks.look_of(paths[0]), kind, conversion)
    conversion, like = _options_like(conversion, kind.options_of(conversion.target))
    conversion = conversion.changed(source_format=name)
    is_local = kind.has_documents or conversion.target in document_targets()
    settings = _settings(paths, conversion, kind.roles_as(is_stream=False), like, is_local, looks)
    if kind.is_staged:
        refuse_parts_of_rows(conversion, kind)
    return settings, partial(_opened, paths, kind, settings)


def _opened(paths: list[Path], kind: Source, settings: Settings) -> Any:
    """Open the source at some paths, and end the looks that have found it."""
    with settings.looks.opening():
        return kind.open(paths, settings)


def _taken(paths: list[Path], conversion: Conversion, looks: SourcePaths) -> tuple[str, Source]:
    """Return the format of a source, and how it is taken."""
    name = conversion.source_format
    if name in ("auto", HDF5):
        found = looks.source(paths[0], conversion)
        if found.foreign_dataset is not None or (found.backend, found.layout) == (HDF5, NOT_IN_PLACE):
            return HDF5, FOREIGN_HDF5
        if name == HDF5:
            return name, STORED_HDF5
        name = _name_of(found)
    elif (row := row_named(name)) is not None and row.read_by:
        name = row.read_by
    if name == "auto":
        return name, STORED_HDF5
    if may_lack_documents(name, conversion) and looks.lack_documents(paths, name, conversion):
        return name, WITHOUT_DOCUMENTS
    asks_for_rows = conversion.target in document_targets() or "layout" in conversion.given  # it is refused by its name
    if name == NPY and asks_for_rows and looks.has_records(paths[0]):
        return name, RECORDS
    return name, source_named(name, conversion)


def _name_of(found: Found) -> str:
    """Return the name of the format of a source that was found, as `source_named` takes it: "auto" for batches."""
    if found.layout == NOT_IN_PLACE or flat_format(found.backend) is not None:
        return found.backend
    return STREAM if found.layout == STREAM_LAYOUT else "auto"


def left_out_of(settings: Settings, read: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files of tokens or text in the folders of a source that it leaves out, but for an earlier result."""
    result = settings.target.path
    found = [file for folder in settings.paths for file in files_left_out(settings.looks.look_of(folder), read)]
    return tuple(file for file in dict.fromkeys(found) if result not in (file, *file.parents))


def _options_like(conversion: Conversion, known: Mapping[str, Taking]) -> tuple[Conversion, tuple[Path, str] | None]:
    """Return a conversion with the options of its `like`, and that store, if the source has to give its dtype."""
    if conversion.like is None:
        return conversion, None
    store = any_path(conversion.like)
    conversion, dtype = options_like(conversion, store, known)
    return conversion, (store, dtype) if conversion.dtype in (None, "keep") else None


def _settings(
    paths: list[Path],
    conversion: Conversion,
    roles: Sequence[Role],
    like: tuple[Path, str] | None,
    is_of_documents: bool,
    looks: SourcePaths,
) -> Settings:
    layout = resolved_as(LayoutOptions, roles, conversion)
    return Settings(
        paths=paths,
        source_format=conversion.source_format,
        roles=roles,
        input=resolved_as(InputOptions, roles, conversion),
        layout=layout,
        target=_target_of(conversion, resolved_as(OutputOptions, roles, conversion), layout, is_of_documents),
        work=resolved_as(WorkOptions, roles, conversion),
        engine=conversion.engine,
        like=like,
        looks=looks,
    )


def _paths_of(source: Any) -> list[Path]:
    """Return the paths of a source; none of one that is open already."""
    if isinstance(source, str | os.PathLike):
        return [named_by_prefix(any_path(source))]
    if isinstance(source, Batches):
        raise ArgumentError(
            f"source: expected a path, or a corpus, found batches of {source.path}: pass their corpus, with batch_size "
            "and seq_len"
        )
    if not isinstance(source, Sequence):
        if not isinstance(source, BatchSource) and not hasattr(source, "__enter__") and missing_members(source):
            raise ArgumentError(f"source: expected a path, a corpus, or an open source, found {source!r:.80}")
        return []
    if not source:
        raise ArgumentError("source: expected one path or more, found none")
    return [named_by_prefix(any_path(each)) for each in source]


def _target_of(conversion: Conversion, options: OutputOptions, layout: LayoutOptions, is_of_documents: bool) -> Target:
    """Return the target of a conversion; `ConvertError` or `ArgumentError` if its destination cannot be one."""
    destination: Path = conversion.destination
    if is_of_documents or conversion.live:
        destination = local_path(destination)
    path = destination
    if isinstance(destination, RemotePath):
        _require_whole_store(destination, conversion)
        path = staging_path(destination)
    _require_place(path)
    cleaned = {"note": without_secrets(options.note), "codec": codec_named(options.codec)}
    return Target(
        **{**vars(options), **cleaned},
        format=conversion.target,
        is_stream=conversion.is_stream,
        destination=destination,
        path=path,
        is_one_file=_is_one_file(conversion, path, layout.holds_out),
        has_requested_shards=conversion.shards is not None or conversion.shard_size is not None,
    )


def _require_whole_store(destination: RemotePath, conversion: Conversion) -> None:
    """Raise `ConvertError` unless a conversion makes a whole store, which can be uploaded."""
    if conversion.shard_range not in (None, WHOLE):
        raise ConvertError(
            f"{destination}: parts are merged on one machine: write a folder, and upload the merged store"
        )
    if not FORMATS[conversion.target].holds_batches:
        raise ConvertError(f"{destination}: expected a format that has stores, found {conversion.target}")


def _require_place(path: Path) -> None:
    """Raise an error if a destination has no folder to be in, or no name."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConvertError(f"{parent}: no such folder; make it first, or choose another output")
    require_name(path)


def _is_one_file(conversion: Conversion, path: Path, holds_out: bool) -> bool:
    """Return whether a destination is one file, and not a folder of shards."""
    others = _suffixes() | {each for row in known_formats().values() if row.writer for each in row.suffixes}
    if conversion.target in document_targets():
        suffix = format_named(conversion.target).suffixes[0]
    elif conversion.is_stream:
        _require_own_name(conversion, path, "", others | OTHER_SUFFIXES)
        return False
    else:
        suffix = FORMATS[conversion.target].suffix
    is_part = conversion.shard_range not in (None, WHOLE)
    several = conversion.shards or conversion.shard_size or holds_out or is_part
    if path.suffix == suffix and several:
        raise ConvertError(f"{path}: is one file; name a folder (no {suffix}) to write shards")
    _require_own_name(conversion, path, suffix, (others | OTHER_SUFFIXES) - {suffix})
    return path.suffix == suffix


def _require_own_name(conversion: Conversion, path: Path, suffix: str, refused: Collection[str]) -> None:
    """Raise `ConvertError` if a destination is named as files of another format are; the line to type is at the end.

    Parameters
    ----------
    suffix
        The ending of one file; "": only a folder is written.
    refused
        The endings of other formats.
    """
    if path.suffix in refused:
        expected = "the name of a folder, for the files of the stream and its documents"
        if suffix:
            expected = f"a folder or a name that ends in {suffix}"
        has_paths = isinstance(conversion.source, str | os.PathLike | Sequence)  # an open source cannot be typed
        line = f": {_line_for_name(conversion, path, refused)}" if has_paths else ""
        raise ConvertError(f"{path}: expected {expected}{line}")


def _line_for_name(conversion: Conversion, path: Path, refused: Collection[str]) -> str:
    """Return the call for the target that a destination is named for; for a folder, if it is named for none.

    Parameters
    ----------
    refused
        The endings that a folder may not have.
    """
    target = next((name for name in document_targets() if path.suffix in format_named(name).suffixes[:1]), "")
    if not target and path.suffix == MEGATRON_INDEX_SUFFIX:
        target = MEGATRON
        path = path.with_suffix(format_named(target).suffixes[0])
    if not target:
        target = conversion.target
        while path.suffix in refused:
            path = path.with_suffix("")
    given = {name: getattr(conversion, name) for name in sorted(conversion.given)}
    if conversion.source_format != "auto":
        given["source_format"] = conversion.source_format
    return conversion_call(conversion.source, target, path, **given)


def _suffixes() -> set[str]:
    """Return the suffixes of the files of all formats."""
    return {suffix for row in batch_formats().values() for suffix in row.file_suffixes}


def staging_path(place: RemotePath) -> Path:
    """Return the folder of this machine in which a store is written before it is uploaded to a URL."""
    digest = hashlib.sha256(str(place).encode("utf-8")).hexdigest()[:UPLOAD_DIGITS]
    return Path(f"{place.name}-{digest}.upload")


def refuse_replaced_sources(sources: Iterable[Path], written: Iterable[Path], destination: Path) -> None:
    """Raise `ConvertError` if a path that is written is or holds a source."""
    taken = {path.resolve() for path in written}
    for path in sources:
        if taken & {path.resolve(), *path.resolve().parents}:
            raise ConvertError(f"{destination}: is or holds the source {path}; choose another output")
