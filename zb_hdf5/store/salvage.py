"""The good part of a damaged or unfinished file: its batches or documents that touch no bad chunk."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentTableFile, write_joined
from zb_hdf5.documents.table_file import PiecesFile
from zb_hdf5.documents.table_writer import PiecesWriter
from zb_hdf5.errors import (
    ArgumentError,
    ChecksumError,
    ConvertError,
    FormatError,
    IncompleteError,
    ZbError,
    counted,
)
from zb_hdf5.files.checked import GROUP_BYTES, Crc32Rows, checked, crc32_of
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batch_writer import FileWriter
from zb_hdf5.formats.broken_file import BrokenFile
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.stream_writer import HDF5ShardWriter
from zb_hdf5.spec import DEFAULT_SPLIT, STREAM_LAYOUT, StoreMeta, TokenArray, documents_path, pieces_path
from zb_hdf5.store.format_list import FORMATS, backend_of_suffix, load_format
from zb_hdf5.store.unchecked_file import open_chunks

#: Numbers of dropped batches or documents that a report shows.
DROPPED_SHOWN: Final = 20


@dataclass
class RepairReport:
    """The outcome of one file.

    Attributes
    ----------
    state
        "whole": nothing was done. "damaged": a dry run, or one that another file of the store stopped. "repaired":
        `output` has the good batches or documents. "lost": it has none, and the index no longer names it.
    unit
        The unit that is kept or dropped as a whole: "batch", or "document" of a stream.
    kept, dropped
        How many units are kept, and the numbers of the dropped ones.
    kept_tokens, dropped_tokens
        Tokens of both; tokens of a document that its writer had not finished are dropped.
    reason
        The damage, and the facts that could not be checked.
    """

    path: str
    state: str = "whole"
    output: str | None = None
    kept: int = 0
    dropped: list[int] = field(default_factory=list)
    reason: str = ""
    unit: str = "batch"
    kept_tokens: int = 0
    dropped_tokens: int = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self.line()})"

    def line(self) -> str:
        """Return the outcome as one line of text."""
        kept = counted(self.kept, self.unit)
        if self.state == "whole":
            return f"whole: {kept}, none bad; nothing to do"
        if self.state == "lost":
            return f"{self.reason}: left out with its {counted(len(self.dropped), self.unit)}"
        verb = "kept" if self.state == "repaired" else "would keep"
        dropped = "dropped none"
        if self.dropped:
            shown = ", ".join(map(str, self.dropped[:DROPPED_SHOWN]))
            more = ", ..." if len(self.dropped) > DROPPED_SHOWN else ""
            dropped = f"dropped {len(self.dropped):,} ({shown}{more})"
        if self.dropped_tokens:
            if not self.dropped:
                dropped += " but an unfinished one"
            dropped += f": {counted(self.dropped_tokens, 'token')} of {self.kept_tokens + self.dropped_tokens:,}"
        return f"{self.reason}: {verb} {kept} in {self.output}, {dropped}"


#: Called with a number of bytes.
CountBytes = Callable[[int], None]


class ReadBytes:
    """The bytes that a repair reads: the bytes of each file once, and what it keeps once more.

    Parameters
    ----------
    progress
        Called with the bytes that were read since the last call.
    announce
        Called with the bytes of all, each time that more are known.
    """

    def __init__(
        self, progress: CountBytes = lambda num_bytes: None, announce: CountBytes = lambda num_bytes: None
    ) -> None:
        self._progress = progress
        self._announce = announce
        self._expected = 0
        self._done = 0

    def expect(self, num_bytes: int) -> None:
        """CountBytes bytes that are to be read."""
        self._expected += num_bytes
        self._announce(self._expected)

    def count(self, num_bytes: int) -> None:
        """CountBytes bytes that were read."""
        self._done += num_bytes
        self._progress(num_bytes)

    def end(self) -> None:
        """Let all be what was read: a damaged file may have less than was expected."""
        self._announce(self._done)


def column_bytes(num_tokens: int, meta: StoreMeta) -> int:
    """Return the bytes of some tokens, and of the values of their fields."""
    return num_tokens * sum([meta.dtype.itemsize, *(each.size * each.dtype.itemsize for each in meta.fields)])


class Salvage:
    """The good part of one file, and the report of it; `IncompleteError` if its documents are lost."""

    def __init__(self, broken: BrokenFile, work: ReadBytes | None = None) -> None:
        self.corpus = broken.corpus
        self._work = work or ReadBytes()
        meta = self.corpus.meta
        self._is_stream = meta.layout == STREAM_LAYOUT
        self._reasons = [broken.reason] if broken.reason else []
        bad = np.array(self._examine(broken.crc32), np.int64)
        self._offsets = self._unit_offsets()
        is_kept = self._whole_units(bad)
        self._lengths = np.diff(self._offsets)[is_kept]
        kept_tokens = int(self._lengths.sum())
        self.report = RepairReport(
            path=str(self.corpus.path),
            state="damaged",
            kept=len(self._lengths),
            dropped=np.flatnonzero(~is_kept).tolist(),
            reason="; ".join(self._reasons),
            unit="document" if self._is_stream else "batch",
            kept_tokens=kept_tokens,
            dropped_tokens=self.corpus.num_tokens - kept_tokens,
        )

    def _unit_offsets(self) -> npt.NDArray[np.int64]:
        """Return the first token of each batch or document, and the end of the last one."""
        corpus = self.corpus
        if not (isinstance(corpus, HDF5Corpus) and self._is_stream):
            return np.arange(corpus.num_units + 1) * corpus.meta.batch_tokens
        try:
            return corpus.doc_offsets.astype(np.int64)
        except (FormatError, ChecksumError) as error:
            raise IncompleteError(
                f"{corpus.path}: no document can be saved: the offsets of its documents are damaged; make it again"
            ) from error

    def _whole_units(self, bad: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which batches or documents touch none of the bad chunks."""
        chunk_tokens = self.corpus.meta.batch_tokens
        starts = self._offsets[:-1]
        ends = self._offsets[1:]
        first_bad = bad.searchsorted(starts // chunk_tokens)  # of the bad chunks that a unit touches
        end_bad = bad.searchsorted((ends - 1) // chunk_tokens, side="right")
        whole: npt.NDArray[np.bool_] = (first_bad == end_bad) | (starts == ends)
        if not self.corpus.complete and len(bad):
            whole &= ends <= bad[0] * chunk_tokens
        return whole

    def _examine(self, stored: npt.NDArray[np.uint32] | None) -> list[int]:
        """Return the chunks that differ from their crc32; if the crc32 rows are damaged, the sha256 of all decides."""
        corpus = self.corpus
        total = corpus.num_units
        crc32, bad, sha256 = _examined(corpus, stored, self._work)
        rows = np.array(crc32, "<u4")  # a chunk that is read again is as it was found
        self._tokens = checked(corpus.tokens, Crc32Rows(lambda: rows), corpus.path, corpus.meta.noun, "batch")
        bad_values: set[int] = set()
        for each in corpus.meta.fields:
            values = corpus.field(each.name)
            known = values.digests.crc32()
            if known is None:
                bad_values |= set(range(total))
            else:
                bad_values |= _examined(values, known, self._work)[1]
        if bad and corpus.sha256 == sha256 and not bad_values and corpus.complete:
            self._reasons = [f"{len(bad):,} stored crc32 are bad, no token is"]
            return []
        bad |= bad_values
        if bad and not corpus.complete:
            first = min(bad)
            self._reasons.append(f"{corpus.meta.noun} {first:,} is bad, and {total - first:,} are lost with it")
            return list(range(first, total))
        if bad:
            self._reasons.append(
                f"the tokens of {counted(len(bad), corpus.meta.noun)} differ from the tokens that were written"
            )
        elif corpus.sha256 not in (None, sha256):
            self._reasons.append("its sha256 differs from its tokens, though each crc32 is right")
        return sorted(bad)

    def is_in(self, path: Path) -> bool:
        """Return whether a whole file has exactly the kept batches or documents."""
        try:
            with open_chunks(path) as corpus:
                other = Salvage(BrokenFile(corpus, corpus.digests.crc32(), ""))
                expected, found = ((m.shape, m.layout, m.fields) for m in (self.corpus.meta, corpus.meta))
                if expected != found or not corpus.complete or other._reasons:
                    return False
                return np.array_equal(other._lengths, self._lengths) and other._sha256() == self._sha256()
        except (ZbError, OSError):
            return False

    def _sha256(self) -> dict[str, str]:
        """Return the digest of the kept values of each field, and of the kept tokens by the name ""."""
        digests = {name: hashlib.sha256() for name in ("", *(field.name for field in self.corpus.meta.fields))}
        for _, tokens, fields in self._parts():
            for name, values in {"": tokens, **fields}.items():
                digests[name].update(np.ascontiguousarray(values))
        return {name: digest.hexdigest() for name, digest in digests.items()}

    def copy(self, path: Path, *, overwrite: bool) -> None:
        """Write the kept batches or documents to a new file."""
        self._work.expect(column_bytes(self.report.kept_tokens, self.corpus.meta))
        if self._is_stream:
            self._copy_documents(path, overwrite)
            return
        meta = self.corpus.meta
        code = load_format(FORMATS[backend_of_suffix(path)])
        with code.write(
            path,
            meta,
            expected_batches=self.report.kept,
            overwrite=overwrite,
            origin=self.corpus.origin,
        ) as writer:
            for _, tokens, values in self._parts():
                batches = tokens.reshape(-1, *meta.shape)
                fields = {f.name: values[f.name].reshape(*batches.shape, *f.shape) for f in meta.fields}
                writer.write(batches, fields)
                self._work.count(column_bytes(tokens.size, meta))
            self._copy_pieces(path, writer)

    def _copy_pieces(self, path: Path, writer: FileWriter) -> None:
        """Write the sidecars of the new file: the pieces of the kept batches, and the documents of a lone file."""
        tokens_sha256 = writer.sha256()
        corpus = self.corpus
        batch_size = corpus.meta.batch_size
        table = documents_path(corpus.path)
        if table.exists():
            write_joined([table], writer.begin_sidecar(documents_path(path)), DEFAULT_SPLIT, tokens_sha256)
        if not pieces_path(corpus.path).exists():
            return
        stored = PiecesFile(corpus.path, None, corpus.meta.seq_len, verify="none")
        with closing(stored), closing(PiecesWriter(path)) as pieces:
            try:
                stored.check()
                for first, stop in self._groups():
                    pieces.append_pieces(stored.read_run(first * batch_size, stop * batch_size))
                file = writer.begin_sidecar(pieces_path(path))
                pieces.write_to(file, seq_len=corpus.meta.seq_len, split=stored.split, tokens_sha256=tokens_sha256)
            except ZbError as error:
                error.add_note(f"Restore it, or remove it to repair {corpus.path} without its pieces.")
                raise

    def _copy_documents(self, path: Path, overwrite: bool) -> None:
        """Write the kept documents to a new stream."""
        if FORMATS[backend_of_suffix(path)].tokens_only:
            raise ArgumentError(f"{path}: expected the name of a file that can hold a token stream: one in .h5")
        meta = self.corpus.meta
        documents = documents_path(self.corpus.path)
        with ExitStack() as stack:
            table = None
            spans: dict[str, Any] = {}
            if documents.exists():
                table = stack.enter_context(closing(DocumentTableFile(documents)))
                spans["spans_codec"] = table.spans_codec
            writer = HDF5ShardWriter(
                path,
                dtype=meta.dtype.name,
                chunk_tokens=meta.chunk_tokens,
                boundary_token_id=meta.boundary_token_id,
                vocab_size=meta.vocab_size,
                tokenizer=meta.tokenizer,
                overwrite=overwrite,
                fields=meta.fields,
                codec=meta.codec,
                origin=self.corpus.origin,
                **spans,
            )
            stack.enter_context(writer)
            for (first, stop), tokens, fields in self._parts():
                rows = None if table is None else table.rows(first, stop)
                writer.write_documents(tokens, np.diff(self._offsets[first : stop + 1]), fields, documents=rows)
                self._work.count(column_bytes(tokens.size, meta))

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Yield (first, stop) of kept units that follow each other: many small ones at once, or one large one."""
        first = 0
        size = GROUP_BYTES // self.corpus.dtype.itemsize
        for end in [*self.report.dropped, len(self._offsets) - 1]:
            while first < end:
                stop = int(self._offsets.searchsorted(self._offsets[first] + size, side="right")) - 1
                stop = min(max(stop, first + 1), end)
                yield first, stop
                first = stop
            first = end + 1

    def _parts(self) -> Iterator[tuple[tuple[int, int], TokenArray, dict[str, TokenArray]]]:
        """Yield (first, stop) of kept units, their tokens, and the values of their fields."""
        for first, stop in self._groups():
            start, end = self._offsets[[first, stop]].tolist()
            values = {f: self.corpus.field(f.name).tokens for f in self.corpus.meta.fields}
            fields = {
                f.name: _values(tokens, start * f.size, end * f.size).reshape(-1, *f.shape)
                for f, tokens in values.items()
            }
            yield (first, stop), _values(self._tokens, start, end), fields


def _values(tokens: Tokens, start: int, stop: int) -> TokenArray:
    out = np.empty(stop - start, tokens.dtype)
    tokens.read([(start, out)])
    return out


def _examined(
    corpus: Corpus, stored: npt.NDArray[np.uint32] | None, work: ReadBytes
) -> tuple[list[int], set[int], str]:
    """Return the crc32 of each chunk, the bad or unreadable chunks, and the sha256 of all readable ones."""
    crc32: list[int] = []
    bad: set[int] = set()
    sha256 = hashlib.sha256()
    size = corpus.meta.batch_tokens
    for number in range(corpus.num_units):
        count = min(size, corpus.num_tokens - number * size)
        work.count(count * corpus.dtype.itemsize)
        try:
            tokens = _values(corpus.tokens, number * size, number * size + count)
        except (FormatError, ConvertError, ChecksumError, OSError) as error:  # ChecksumError: it does not unpack
            if isinstance(error, OSError) and error.errno != errno.EIO:  # EIO: a bad sector, of this chunk alone
                raise
            crc32.append(0)
            bad.add(number)
        else:
            crc32.append(crc32_of(tokens))
            sha256.update(tokens)
            if stored is not None and stored[number] != crc32[number]:
                bad.add(number)
    return crc32, bad, sha256.hexdigest()
