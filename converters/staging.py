"""Tokenized text on its way to a store: raw token files in a `.partial/` folder."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zb_hdf5.converters.npy_files import OpenFiles
from zb_hdf5.converters.routing import DocumentCounts
from zb_hdf5.converters.source import TokenCounts
from zb_hdf5.converters.task import Progress, no_progress
from zb_hdf5.converters.text_plan import TokenizeTask
from zb_hdf5.converters.token_files import FinishedTokens, combined
from zb_hdf5.files.publishing import disk_errors
from zb_hdf5.formats.document_file import DocumentFile, documents_path
from zb_hdf5.formats.document_writer import DocumentsWriter
from zb_hdf5.spec import SHARD_PREFIX, TokenArray


class StagingFile(NamedTuple):
    """Tokenized documents on disk: raw tokens, and beside them the table of the documents."""

    path: Path
    split: str
    num_tokens: int
    token_counts: TokenCounts


def staging_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Return where a staging file is, and the table of its documents."""
    path = folder / f"{SHARD_PREFIX}{number:05}.tokens"
    return path, documents_path(path)


def write_staging_file(task: TokenizeTask, progress: Progress = no_progress) -> FinishedTokens:
    """Tokenize the documents of one staging file."""
    counts, digest = DocumentCounts(), hashlib.sha256()
    path, table = task.paths
    with disk_errors(path), open(path, "wb") as tokens, DocumentsWriter(table) as documents:
        for encoded in task.encode(counts, progress):
            data = encoded.tokens.astype(task.dtype)
            tokens.write(data)
            digest.update(data)
            documents.append(encoded.lengths, encoded.rows())
        tokens.flush()
        os.fsync(tokens.fileno())
        documents.publish(task.shard.split)
    with open(table, "rb") as written:
        return FinishedTokens(documents.token_count, counts, combined([digest, hashlib.file_digest(written, "sha256")]))


class StagedTokens:
    """The staging files of one split as one document stream. See `DocumentStream`."""

    def __init__(self, files: Sequence[StagingFile], dtype: np.dtype[Any]) -> None:
        self.split = files[0].split
        self._tables = [documents_path(file.path) for file in files]
        self._open_files, self._itemsize = OpenFiles([file.path for file in files]), dtype.itemsize
        self._starts = [0, *accumulate(file.num_tokens for file in files)]
        self.num_tokens = self._starts[-1]

    def documents(self) -> Iterable[DocumentFile]:
        return map(DocumentFile, self._tables)

    def read_into(self, name: str, start: int, out: TokenArray) -> None:
        done = 0
        while done < len(out):
            number = bisect_right(self._starts, start + done) - 1
            begin = start + done - self._starts[number]
            take = min(len(out) - done, self._starts[number + 1] - start - done)
            self._open_files.read_into(number, begin * self._itemsize, out[done : done + take])
            done += take
