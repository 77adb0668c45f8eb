"""The corpus of what a look has found: of a store, of a lone file, and of files that are in no store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError
from zb_hdf5.files.listing import name_below
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT, named_splits, split_named
from zb_hdf5.files.paths import RemotePath, on_failure
from zb_hdf5.formats.batch_writer import FieldDigest
from zb_hdf5.formats.corpus import Corpus, FieldSource, OpenedAs
from zb_hdf5.formats.flat_digest import FlatDigest
from zb_hdf5.formats.flat_facts import FlatFacts, require_alike
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.windows import Windows
from zb_hdf5.read_as import ReadAs
from zb_hdf5.spec import (
    BATCHES_LAYOUT,
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_SPLIT,
    NO_SHA256,
    NOT_COUNTED,
    NOT_KNOWN,
    STREAM_LAYOUT,
    StoreMeta,
    fitting_dtype,
)
from zb_hdf5.store.digests import Digests
from zb_hdf5.store.flat_table import flat_table
from zb_hdf5.store.format_list import FORMATS, load_format
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.found_store import FoundStore
from zb_hdf5.store.index import ShardIndex, require_files
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.store_corpus import FLAT_DTYPE, NewerFiles, StoreCorpus
from zb_hdf5.store.store_documents import StoreDocuments

if TYPE_CHECKING:  # h5py, which a finished store does not need
    from zb_hdf5.formats.h5_column import Column


def corpus_of(
    found: Found,
    look: Look | None = None,
    *,
    opened: OpenedAs | None = None,
    training_split: str | None = None,
) -> Corpus:
    """Open what was found at a path. Raises as `open_corpus`.

    Parameters
    ----------
    look
        The look by which it was found, if it is open: its first file is read by its descriptor. None: `found.look`.
    opened, training_split
        As for `Corpus.opened_by`.
    """
    look = look or found.look
    if found.layout != BATCHES_LAYOUT:
        corpus: Corpus = _stream_of(found, look)
    elif isinstance(found, FoundStore):
        corpus = _store_of(found)
    else:
        corpus = _records_of(found, look) if found.facts else _file_of(found, look)
    return corpus.opened_by(_found_set, opened, training_split)


def _found_set(corpus: Corpus, name: str, path: Path | None, allow_missing: Mapping[str, float] | None) -> FieldSource:
    from zb_hdf5.store.found_set import found_set  # which few readers need

    return found_set(corpus, name, path, allow_missing)


def _stream_of(found: Found, look: Look | None) -> StoreCorpus:
    """Open the files of a token stream, which may grow."""
    index = stream_index(found)
    compare_digests(found, look)
    newer = partial(_newer_files, found.path, found.access, found.verify, found.read_as, found.split)
    return _over(found, index, newer=newer, look=None if look is None else found.look_at_first(look))


def _over(
    found: Found,
    index: ShardIndex,
    *,
    records: Windows | None = None,
    newer: NewerFiles | None = None,
    look: Look | None = None,
) -> StoreCorpus:
    """Return the corpus of files in no store, by an index that was made of them; `look` is that at the first one."""
    return StoreCorpus(
        found.path,
        index,
        access=found.access,
        verify=found.verify,
        read_as=found.read_as,
        found=found.known,
        records=records,
        newer=newer,
        look=look,
    )


def _newer_files(
    path: Path, access: str, verify: str, read_as: ReadAs, split: str | None
) -> tuple[ShardIndex, Mapping[int, Column | FlatFacts]]:
    """Look at the path of a stream again; return the index of its files, and the facts of those that are open."""
    now = found_at(path, access=access, verify=verify, read_as=read_as, split=split)
    index = stream_index(now)
    compare_digests(now)
    return index, now.known


def compare_digests(found: Found, look: Look | None = None) -> None:
    """Compare the digests of all files of the split, if `verify="store"` asks for it. Raises as `open_corpus`.

    Parameters
    ----------
    look
        A look at the path, or at a file there; None: there is none.
    """
    if found.verify == "store":
        from zb_hdf5.store.opened_path import OpenedPath
        from zb_hdf5.store.verify import require_digests  # with h5py, which a finished store does not need

        is_at_path = look is not None and look.path == found.path
        opened = OpenedPath(look=look if is_at_path else None)
        require_digests(found.path, found.split, found.read_as, opened)


def stream_index(found: Found) -> ShardIndex:
    """Return the index of the files of a stream, of the split that is asked for.

    Raises
    ------
    FormatError
        If it holds batches, or a file is missing.
    """
    if found.layout != STREAM_LAYOUT:
        raise FormatError(f"{found.path}: expected a token stream, found batches; open_reader opens them")
    if isinstance(found, FoundStore):
        return _index_of_store(found)
    return _index_of_files(found) if found.column is None else _index_of_column(found, found.column)


# --- stores --------------------------------------------------------------------------------------------------------


def _store_of(found: FoundStore) -> Corpus:
    if isinstance(found.path, RemotePath) and not found.index.complete:
        raise IncompleteError(f"{found.path}: is still written: a store that grows is read on its own machine only")
    compare_digests(found)
    index = found.index.of_split(found.split, found.path)
    folder = found.folder
    require_files(folder, index)
    if index.complete:
        return StoreCorpus(folder, index, access=found.access, verify=found.verify)
    from zb_hdf5.store.live import LiveCorpus  # h5py, which a finished store does not need

    return LiveCorpus(folder, index, found.access, found.verify)


def _index_of_store(found: FoundStore) -> ShardIndex:
    index = found.index.of_split(found.split, found.path)
    values = index.table.values
    if not all(values["complete"]):
        name = values["path"][list(values["complete"]).index(False)]
        raise IncompleteError(f"{found.folder / name}: its writer has not finished; make it again")
    require_files(found.folder, index)
    return index


# --- a lone file with batches, or with a stream of ours ------------------------------------------------------------


def _file_of(found: Found, look: Look | None) -> Corpus:
    _require_no_split(found)
    corpus = load_format(FORMATS[found.backend], found.read_as).open(found.lone_file(look))
    with on_failure(corpus.close):
        if corpus.foreign_dataset is None and corpus.complete:
            return corpus.with_documents(StoreDocuments.of_file(corpus, found.verify, found.access))
    return corpus


def _index_of_column(found: Found, column: Column) -> ShardIndex:
    _require_no_split(found)
    entry = ShardEntry(
        found.path.name,
        found.backend,
        0,
        column.num_units,
        column.num_tokens,
        column.sha256 or NO_SHA256,
        document_count=_documents_of(column),
        complete=column.complete,
        fields={field.name: FieldDigest() for field in column.meta.fields},
        compressed=column.compressed,
    )
    return ShardIndex(column.meta, [entry])


def _documents_of(column: Column) -> int:
    """Return the number of documents of a stream; `NOT_KNOWN`, or `NOT_COUNTED` where a field tells them apart."""
    if column.is_foreign:
        return NOT_COUNTED if column.told_by else NOT_KNOWN
    if column.complete:
        return column.meta.document_count
    from zb_hdf5.documents.document_offsets import DocumentOffsets

    # a killed writer may have been ahead with documents
    with closing(DocumentOffsets(column.path, column.num_tokens, column.identity)) as offsets:
        return len(offsets.rows()) - 1


def _require_no_split(found: Found) -> None:
    """Raise `ArgumentError` if a split is asked for that is neither that of a lone file nor that of its name."""
    path = found.path
    asked = split_named(found.split)
    if asked not in (None, AUTO_SPLIT, DEFAULT_SPLIT, *named_splits([path], [path])):
        raise ArgumentError(f"{path}: split={found.split!r} needs a store, found one file without it in its name")


# --- files of other programs ---------------------------------------------------------------------------------------


def _records_of(found: Found, look: Look | None) -> StoreCorpus:
    index = _index_of_files(found)
    compare_digests(found, look)
    records = Windows.of(*found.facts[0].record_shape)
    return _over(_with_dataset(found), index, records=records, look=None if look is None else found.look_at_first(look))


def _with_dataset(found: Found) -> Found:
    """Return files of another program with the name of their dataset, if they have one."""
    dataset = found.foreign_dataset
    return found if dataset is None else replace(found, read_as=replace(found.read_as, dataset=dataset))


def _index_of_files(found: Found) -> ShardIndex:
    """Return the index of the files as chunks of one stream, whatever the axes of datasets are."""
    read_as = _with_dataset(found).read_as
    folder = os.path.join(found.path if found.path.is_dir() else found.path.parent, "")
    names = [each.text.removeprefix(folder) for each in found.facts]
    digests = {} if read_as.digests is None else _digests_of(found, Digests.load(read_as.digests), names)
    columns = [each.column for each in found.facts if each.column is not None]
    meta = _meta_of_columns(found, columns) if columns else _meta_of_ids(found.facts)
    table = flat_table(found.backend, names, found.facts, list(found.splits), digests)
    source = {} if columns else {FLAT_DTYPE: np.result_type(*{each.dtype for each in found.facts}).str}
    return ShardIndex(meta, table, source=source, digests=digests, read_as=read_as)


def _digests_of(found: Found, made: Digests, names: Sequence[str]) -> dict[str, FlatDigest]:
    """Return the digests that were made of some files, by their names."""
    known = made.require_all(found.path, found.backend, found.facts)
    if found.foreign_dataset is not None:
        made.require_dataset(_with_dataset(found).read_as)
    return {name: known[name_below(found.path, each.path)] for name, each in zip(names, found.facts, strict=True)}


def _meta_of_ids(facts: Sequence[FlatFacts]) -> StoreMeta:
    """Return the stream of files of ids, of the smallest dtype that holds the ids of all files."""
    require_alike(facts)
    dtype = fitting_dtype({each.dtype for each in facts}, vocab_size=0)
    return StoreMeta(1, DEFAULT_CHUNK_TOKENS, dtype, layout=STREAM_LAYOUT, fields=facts[0].fields)


def _meta_of_columns(found: Found, columns: Sequence[Column]) -> StoreMeta:
    """Return the stream of the datasets of HDF5 files of another program."""
    from zb_hdf5.formats.h5_tokens import require_access

    for column in columns:
        require_access(column, found.access)
    first = columns[0].meta
    unfit = tuple(sorted({each for column in columns for each in column.meta.unfit}))
    return StoreMeta(1, DEFAULT_CHUNK_TOKENS, first.dtype, layout=STREAM_LAYOUT, fields=first.fields, unfit=unfit)
