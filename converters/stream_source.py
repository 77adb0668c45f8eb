"""Token streams with documents as a source: packed into rows, with their fields, pieces and document tables."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from zb_hdf5 import ArgumentError, StoreMeta
from zb_hdf5.converters.batch_target import is_one_file, part_of, refuse_bad_destination
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.journal import WHOLE
from zb_hdf5.converters.packed import PackedSource
from zb_hdf5.converters.source import TokenCounts, require_pad_id
from zb_hdf5.documents.document_table import DocumentFile
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import scratch_directory
from zb_hdf5.spec import DEFAULT_SPLIT, DOCUMENTS_SUFFIX, INDEX_NAME, TokenArray, stored_dtype
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.opening import stream_format
from zb_hdf5.store.stream_documents import MmapTokenStore, require_digests


class StreamTokens:
    """The tokens and fields of one split of a stream. See `DocumentStream`."""

    def __init__(self, path: Path, split: str) -> None:
        self.split, self.store = split, MmapTokenStore(path, split=split)
        self.num_tokens = self.store.num_tokens
        self._columns = {field.name: (self.store.field(field.name), field.size) for field in self.store.fields}
        self._columns[""] = self.store, 1

    def documents(self) -> Iterable[DocumentFile]:
        return self.store.documents.open_files()

    def read_into(self, name: str, start: int, out: TokenArray) -> None:
        column, size = self._columns[name]
        flat = out.reshape(-1)
        stored = flat if flat.dtype == column.dtype else np.empty(len(flat), column.dtype)
        column.tokens.read([(start * size, stored)])
        if stored is not flat:
            flat[...] = stored


class StreamSource(PackedSource):
    """Batches of the packed documents of an HDF5 stream, or of a store of streams: each split by itself."""

    def __init__(self, path: str | os.PathLike[str], folder: Path, options: Conversion) -> None:
        path, dtype = Path(path), options.dtype or "keep"
        if stream_format(path) != "hdf5":
            raise ArgumentError(f"{path}: expected a token stream of documents in HDF5, found none")
        streams = [StreamTokens(path, split) for split in _splits(path)]
        store = streams[0].store
        if not store.has_documents:
            raise ArgumentError(f"{path}: expected a stream with documents, found none: cut records with hdf5-to-hdf5")
        self._path, self._checked = path, False
        meta = StoreMeta(
            options.batch_size or 0, options.seq_len or 0, store.dtype if dtype == "keep" else stored_dtype(dtype),
            (options.seed or 0) if options.shuffle else 0, 0, sum(len(stream.store.documents) for stream in streams),
            store.vocab_size, store.tokenizer, fields=store.fields,
        )  # fmt: skip
        pad_id = max(0, store.boundary_token_id) if options.pad_id is None else options.pad_id
        require_pad_id(pad_id, meta)
        description = {"format": "stream", "files": [str(path)], "packing": options.packing, "pad_id": pad_id}
        tables = [file.with_name(file.name + DOCUMENTS_SUFFIX) for stream in streams for file in stream.store.paths]
        files = [file for stream in streams for file in stream.store.paths]
        super().__init__(
            streams, folder, meta, options, pad_id, description=description,
            paths=[*files, *(table for table in tables if table.exists())],
            token_counts=TokenCounts(sum(stream.num_tokens for stream in streams)),
        )  # fmt: skip
        self.identity["fingerprints"] = [stream.store.fingerprint for stream in streams]

    def check_reads(self) -> None:
        """Compare the whole stream with its digests, once: rows are cut from its chunks anywhere."""
        if not self._checked:
            require_digests(self._path)
        self._checked = True


@contextmanager
def open_stream(paths: list[Path], conversion: Conversion) -> Generator[StreamSource]:
    """Open a `StreamSource` whose plan lies in `<destination>.plan.partial/` inside the block; each job has its own."""
    [path], part = paths, part_of(conversion)
    destination = local_path(conversion.destination)  # the plan of the rows lies in the same folder
    refuse_bad_destination([local_path(path)], destination)
    several = bool(conversion.num_shards or conversion.shard_bytes) or part != WHOLE
    is_one_file(conversion.target, destination, several=several)
    plan = destination.with_name(destination.name + (".plan" if part == WHOLE else f".plan-{part.job}"))
    with scratch_directory(plan) as folder:
        yield StreamSource(path, folder, conversion)


def _splits(path: Path) -> list[str]:
    """Return the splits of a stream, that for training first."""
    folder = path.parent if path.name == INDEX_NAME else path
    if not (folder / INDEX_NAME).exists():
        return [DEFAULT_SPLIT]
    found = dict.fromkeys(shard.split for shard in ShardIndex.load(folder).shards)
    return sorted(found, key=lambda split: split != DEFAULT_SPLIT)
