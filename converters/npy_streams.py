"""1-D `.npy` files of tokens to a store of token streams: a boundary token tells where documents end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError
from zb_hdf5.columns.reader import require_choice
from zb_hdf5.converters.journal import remove_journals
from zb_hdf5.converters.npy_source import NpyFile, expand
from zb_hdf5.converters.routing import DocumentCounts
from zb_hdf5.converters.run import WorkOptions, refuse_bad_destination
from zb_hdf5.converters.shard import file_states
from zb_hdf5.converters.task import Progress, no_progress, tokens_written
from zb_hdf5.converters.to_streams import StreamReport
from zb_hdf5.converters.token_files import FinishedTokens, files_sha256, write_token_files
from zb_hdf5.files.publishing import PartialDirectory
from zb_hdf5.formats.document_file import DocumentRows, documents_path
from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import SHARD_PREFIX, TokenArray
from zb_hdf5.store.streams import index_streams

#: Where the boundary token of a document stands.
BOUNDARIES: Final = ("behind", "front")
#: Tokens that are looked at together; documents that end in them are written together.
BLOCK_TOKENS: Final = 1 << 22


@dataclass(frozen=True)
class CutTask:
    """One `.npy` file, to be cut into the documents of one stream. Picklable."""

    source: Path
    path: Path
    dtype: str
    boundary_token_id: int
    boundary: str
    vocab_size: int

    @property
    def paths(self) -> tuple[Path, Path]:
        """The stream, and the table of its documents."""
        return self.path, documents_path(self.path)

    def tokens_done(self) -> int:
        """Return how far another process is, by the size of its file."""
        return tokens_written(self.path, np.dtype(self.dtype))


def npy_to_stream(
    sources: Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    boundary_token_id: int,
    boundary: str = "behind",
    dtype: str = "auto",
    vocab_size: int = 0,
    work: WorkOptions | None = None,
) -> StreamReport:
    """Convert 1-D `.npy` files to a store of HDF5 token streams, a shard for each file.

    The tokens stay as they are. Their documents get a table, with the file of each and its place in it: packed into
    batches later (`stream-to-hdf5`), they are still told apart.

    Parameters
    ----------
    sources
        Files, or folders whose `.npy` files are taken in the order of their paths.
    boundary_token_id
        The token that stands once in each document, and nowhere else.
    boundary
        "behind": it is the last token of a document; "front": the first one. Tokens before the first boundary token,
        or behind the last one, are a document without one.
    dtype
        "uint16", "uint32", or "auto": uint16 where the dtype of the files or `vocab_size` says that every id fits.
    vocab_size
        If known (not 0), larger ids are refused.

    Raises
    ------
    ArgumentError, ConvertError
        If a file has another shape, an id does not fit, no file has a token, or the destination exists, or is or
        holds a file of the source.
    FormatError, IncompleteError
        If a file is no whole `.npy` file.
    """
    require_choice("boundary", boundary, BOUNDARIES)
    require_choice("dtype", dtype, ("auto", "uint16", "uint32"))
    if boundary_token_id < 0:
        raise ArgumentError(f"boundary_token_id: expected the id of a token, found {boundary_token_id}")
    destination, work = Path(destination), work or WorkOptions()
    start_s = time.monotonic()
    paths = expand(sources)
    refuse_bad_destination(paths, destination)
    files = [_open(path) for path in paths]
    small = all(file.dtype.kind == "u" and file.dtype.itemsize <= 2 for file in files) or 0 < vocab_size <= 2**16
    stored = ("uint16" if small else "uint32") if dtype == "auto" else dtype
    states = file_states(paths)
    how = {"boundary_token_id": boundary_token_id, "boundary": boundary}
    source: dict[str, Any] = {"format": "npy", "files": [str(path) for path in paths], **how}
    plan = {"source": source, "dtype": stored, "vocab_size": vocab_size, "files": states}
    with PartialDirectory(destination, overwrite=work.overwrite) as folder:
        tasks = {
            number: CutTask(
                file.path, folder.partial_path / f"{SHARD_PREFIX}{number:05}-of-{len(files):05}.h5", stored,
                boundary_token_id, boundary, vocab_size,
            )
            for number, file in enumerate(files)
        }  # fmt: skip
        written = write_token_files(tasks, write_documents, plan, folder, work, paths)
        index = index_streams([task.path for task in tasks.values()], source=source)
        index.save(folder.partial_path)
        folder.on_published(remove_journals)
    tokens_kept = sum(done.token_count for done in written.kept)
    duration_s = time.monotonic() - start_s
    return StreamReport(destination, index, written.counts, duration_s, len(written.kept), tokens_kept)


def _open(path: Path) -> NpyFile:
    shape, *_ = read_npy_header(path)
    if len(shape) != 1:
        raise ConvertError(f"{path}: expected a 1-D stream of tokens, found shape {shape}; npy-to-hdf5 takes records")
    return NpyFile.open(path, 1)


def write_documents(task: CutTask, progress: Progress = no_progress) -> FinishedTokens:
    """Cut one file into documents, and write them."""
    file, counts = _open(task.source), DocumentCounts()
    tokens: TokenArray = np.memmap(file.path, file.dtype, "r", file.byte_offset, file.shape) if file.num_tokens else (
        np.empty(0, file.dtype)
    )  # fmt: skip
    with HDF5ShardWriter(
        task.path, dtype=task.dtype, boundary_token_id=task.boundary_token_id, vocab_size=task.vocab_size,
        overwrite=True,
    ) as writer:  # fmt: skip
        for start, lengths in cut(tokens, task.boundary_token_id, task.boundary):
            stop, first = start + int(lengths.sum()), counts.documents
            rows = np.arange(first + 1, first + 1 + len(lengths), dtype=np.uint64)
            documents = DocumentRows([str(task.source)], np.zeros(len(lengths), np.uint32), rows)
            try:
                writer.write_documents(tokens[start:stop], lengths, documents=documents)
            except ConvertError as error:
                raise ConvertError(f"{task.source}: {error}") from error
            counts.documents += len(lengths)
            progress(stop - start)
        info = writer.finish()
    counts.tokens.tokens_in = info.token_count
    return FinishedTokens(info.token_count, counts, files_sha256(task.paths))


def cut(tokens: TokenArray, boundary_token_id: int, boundary: str) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield the documents of a stream, many at a time: the place of the first one's first token, and their lengths."""
    start = 0
    for block in range(0, len(tokens), BLOCK_TOKENS):
        found = np.flatnonzero(tokens[block : block + BLOCK_TOKENS] == boundary_token_id) + block
        edges = found if boundary == "front" else found + 1
        edges = edges[edges > start]
        if len(edges):
            yield start, np.diff(edges, prepend=start)
            start = int(edges[-1])
    if start < len(tokens):
        yield start, np.array([len(tokens) - start])
