"""Token streams as a source of documents that are kept: our own streams, and files of other trainers as they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError, FormatError, UnverifiableError
from zb_hdf5.converters.conversion import STREAM, InputOptions
from zb_hdf5.converters.least_dtype import NOT_NAMED, larger_dtype
from zb_hdf5.converters.source_paths import stream_of
from zb_hdf5.documents.document_table import DocumentTableFile
from zb_hdf5.documents.metadata import NO_SOURCE, DocumentRows, row_of_source
from zb_hdf5.field import Field
from zb_hdf5.files.listing import require_named_once
from zb_hdf5.files.named_splits import named_splits
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.document_source import DocumentFilter, DocumentGroup, DocumentSource, TokenizedDocuments
from zb_hdf5.formats.format import Found
from zb_hdf5.spec import (
    DEFAULT_SPLIT,
    NO_BOUNDARY,
    NOT_KNOWN,
    StoreMeta,
    TokenArray,
    documents_path,
    fitting_dtype,
    stored_dtype,
)
from zb_hdf5.store.format_list import flat_format
from zb_hdf5.store.found_store import FoundStore
from zb_hdf5.store.store_corpus import StoreCorpus

#: Tokens of a group: the tokens of the documents that begin in it. Groups decide which documents are held out.
GROUP_TOKENS: Final = 1 << 24
#: Tokens and documents that are read at once; a longer document is read alone.
READ_TOKENS: Final = 1 << 22
#: Tokens that are read at once within a memory that is bounded.
BOUNDED_TOKENS: Final = 1 << 19
READ_DOCUMENTS: Final = 1 << 18
#: A document of more tokens is a view of its file, where that may be mapped: a file without documents is one.
LONG_DOCUMENT: Final = 1 << 26
_Value = TypeVar("_Value")


class StreamFile(NamedTuple):
    """One file of a stream, and the cut of its documents, or of its tokens, into groups.

    Attributes
    ----------
    stream
        The stream, of one split.
    number
        The number of the file in it.
    split
        The split of the stream; None: it has all files.
    path
        The file.
    cuts
        The first document of each group, and the end of the last one; of pieces their first tokens in the file.
    """

    stream: StoreCorpus
    number: int
    split: str | None
    path: Path
    cuts: list[int]

    @property
    def table(self) -> DocumentTableFile:
        """The facts of its documents."""
        return self.stream.require_documents().file(self.number)

    @property
    def unit(self) -> int:
        """The tokens that have one digest, and are read together."""
        return self.stream.tokens.unit if self.stream.verify == "batch" else 1

    def read_tokens(self, start: int, stop: int) -> TokenArray:
        """Return consecutive tokens by their positions in the file."""
        tokens = self.stream.tokens
        base = tokens.files.starts[self.number]
        if stop - start > LONG_DOCUMENT:
            view = tokens.view(base + start, stop - start)
            if view is not None:
                return view
        return _read_units(tokens, base, (start, stop), self.unit)

    def read_fields(self, fields: Sequence[Field], start: int, stop: int) -> dict[str, npt.NDArray[Any]] | None:
        """Return the values of some fields for consecutive tokens of the file; None if there are none."""
        found = {}
        for field in fields:
            values = self.stream.field(field.name).tokens
            size = field.size
            base = values.files.starts[self.number]
            flat = _read_units(values, base, (start * size, stop * size), self.unit * size)
            found[field.name] = flat.reshape(stop - start, *field.shape)
        return found or None


def _read_units(tokens: Tokens, base: int, run: tuple[int, int], unit: int) -> npt.NDArray[Any]:
    """Return a run of the values of one file, which begins at `base`: whole units are read, since these have digests.

    A part of a unit would be copied once more, and its unit compared for each part.
    """
    start, stop = run
    first = start // unit * unit
    end = min(-(-stop // unit) * unit, tokens.num_tokens - base)
    values = np.empty(end - first, tokens.dtype)
    tokens.read([(base + first, values)])
    return values[start - first : stop - first]


class StreamSource(DocumentSource):
    """The documents of token streams, with their fields, ids, metadata and spans, in their order.

    A stream that has digests is compared with them as it is read.

    Parameters
    ----------
    at_paths
        The streams by their paths: files, folders and stores.
    options
        The size of the vocabulary, the token at the end of each document, and how the files are read.
    dtype
        The stored dtype; "keep": that of the streams; "auto": a smaller one if the size of the vocabulary proves it.
    read_tokens
        The tokens that are read at once; None: as many as are read fast.
    """

    def __init__(
        self,
        at_paths: Mapping[Path, Found],
        options: InputOptions,
        dtype: str = "auto",
        *,
        read_tokens: int | None = None,
    ) -> None:
        self._read_tokens = read_tokens or READ_TOKENS
        paths = list(at_paths)
        self._streams = {
            (path, split): _opened(found, split)
            for path, found in at_paths.items()
            for split in ([None] if options.is_one_split else found.splits_there())
        }
        self._files = [
            StreamFile(stream, number, split, file.path, self._cuts(stream, number, file.path))
            for (_, split), stream in self._streams.items()
            for number, file in enumerate(stream.files)
        ]
        require_named_once((file.path for file in self._files), "documents")
        files = [file.path for file in self._files]
        self.has_shards = all(isinstance(found, FoundStore) for found in at_paths.values())
        self.paths = [*files, *(each for file in self._files for each in sidecars_at(file.stream.backend, file.path))]
        self.splits = [file.split or DEFAULT_SPLIT for file in self._files]
        if len(paths) > 1 and not options.is_one_split:
            in_store = {path for path, found in at_paths.items() if isinstance(found, FoundStore)}
            is_lone = [path not in in_store for (path, _), stream in self._streams.items() for _ in stream.files]
            self.splits = _splits_of(self._files, is_lone, paths)
        self.num_tokens = sum(stream.num_tokens for stream in self._streams.values())
        largest = [stream.max_token for stream in self._streams.values()]
        self.max_token = None if None in largest else max(each or 0 for each in largest)
        self._take_facts(options, dtype)
        self._take_documents()
        self.groups = [
            DocumentGroup(number, group, size, size)
            for number, file in enumerate(self._files)
            for group, size in enumerate(self._group_bytes(file))
        ]
        backend = at_paths[paths[0]].backend
        self.description = {
            "format": STREAM if flat_format(backend) is None else backend,
            "files": [str(path) for path in paths],
            "boundary_token_id": self.boundary_token_id,
            **options.headerless,
        }
        self.suspects = options.suspects
        self.identity = {
            "fingerprints": [stream.fingerprint for stream in self._streams.values()],
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
        }

    def _take_facts(self, options: InputOptions, dtype: str) -> None:
        """Take over the facts of the tokens, which all streams have in common."""
        streams = self._streams.values()
        metas = [stream.index.without_max_token().meta for stream in streams]
        self.tokenizer = self._common("tokenizer", [meta.tokenizer for meta in metas])
        self.fields = self._common("fields", [meta.fields for meta in metas])
        self.vocab_size = options.vocab_size or self._common("vocab_size", [meta.vocab_size for meta in metas])
        stored = self._common("boundary_token_id", [meta.boundary_token_id for meta in metas])
        named = options.boundary_token_id
        if named is not None and stored not in (NO_BOUNDARY, named):
            raise ArgumentError(
                f"{self.paths[0]}: its documents end with token {stored}, found boundary_token_id {named}",
                options=["boundary_token_id"],
            )
        self._named_boundary = named if stored == NO_BOUNDARY else None
        self.boundary_token_id = named if stored == NO_BOUNDARY else stored
        if dtype not in NOT_NAMED:
            self.dtype = stored_dtype(dtype)
            return
        kept = larger_dtype(*(stream.dtype for stream in streams))
        self.dtype = fitting_dtype([kept], options.vocab_size) if dtype == "auto" else kept

    def _take_documents(self) -> None:
        """Take over which facts the documents have."""
        tables = self._tables
        self.has_ids = any(table.has_ids for table in tables)
        self.has_metadata = any(table.has_metadata for table in tables)
        codecs = dict.fromkeys(table.spans_codec for table in tables if table.has_spans)
        if len(codecs) > 1:
            raise ConvertError(
                f"{self.paths[0]}: spans are encoded as {' and '.join(codecs)}: convert files one by one"
            )
        self.spans_codec = next(iter(codecs), "")

    def _common(self, name: str, values: Sequence[_Value]) -> _Value:
        """Return the one value that all streams have; `ConvertError` if they have several."""
        for (path, _), value in zip(self._streams, values, strict=True):
            if value != values[0]:
                raise ConvertError(
                    f"{path}: expected the same {name} as in the others, {values[0]!r:.80}, found {value!r:.80}: "
                    "convert them one by one"
                )
        return values[0]

    @property
    def _tables(self) -> list[DocumentTableFile]:
        """The facts of the documents of each file; [] where they are not told apart."""
        return [file.table for file in self._files]

    @property
    def num_documents(self) -> int:
        """The documents of all files; 0 where they are not told apart."""
        return sum(table.count for table in self._tables)

    @property
    def has_offsets_in_memory(self) -> bool:
        """Whether each process that has a file open holds the offsets of its documents, and maps none."""
        return any(flat_format(stream.backend) is not None for stream in self._streams.values())

    @property
    def block_bytes(self) -> int:
        """The most bytes that are read at once, of the longest document at least. All edges are looked at for it."""
        longest = max([self._read_tokens, *map(_longest_document, self._tables)])
        units = 2 * max(file.unit for file in self._files)
        of_token = self.dtype.itemsize + sum(each.dtype.itemsize * each.size for each in self.fields)
        return (longest + units) * of_token

    def _group_bytes(self, file: StreamFile) -> list[int]:
        """Return the bytes of the tokens of each group."""
        return [(stop - start) * self.dtype.itemsize for start, stop in pairwise(self._ends(file))]

    def _cuts(self, stream: StoreCorpus, number: int, path: Path) -> list[int]:
        """Return the cuts of a file into groups. See `StreamFile`."""
        start, stop = stream.tokens.files.starts[number : number + 2]
        num_tokens = stop - start
        targets = np.arange(GROUP_TOKENS, num_tokens, GROUP_TOKENS)
        table = stream.require_documents().file(number)
        if table.edge(table.count) != num_tokens:
            raise FormatError(
                f"{path}: expected documents of {num_tokens:,} tokens, found {table.edge(table.count):,}: "
                "tokens belong to no document; write the stream again"
            )
        return sorted({0, *table.number_of(targets.astype(np.uint64)).tolist(), table.count})

    def _ends(self, file: StreamFile) -> list[int]:
        """Return the first token of each group of a file, and the end of the last one."""
        return [file.table.edge(number) for number in file.cuts]

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        file = self._files[group.file_number]
        first, stop = file.cuts[group.number : group.number + 2]
        table = file.table
        base = table.edge(first)
        for begin, end in _blocks(table, first, stop, self._read_tokens):
            edges = table.edges(begin, end).astype(np.int64)
            wanted = None if choose is None else choose(end - begin)
            if wanted is not None and not wanted.any():
                continue
            facts = table.rows(begin, end)
            block = self._block(file, begin, edges, facts)._replace(read=int(edges[-1] - base) * self.dtype.itemsize)
            self._require_boundary(block)
            yield from _by_source(block, facts, wanted)

    def _block(
        self, file: StreamFile, first: int, edges: npt.NDArray[np.int64], facts: DocumentRows
    ) -> TokenizedDocuments:
        """Return consecutive documents of a file, from their edges on, as if all were from this file."""
        start = int(edges[0])
        stop = int(edges[-1])
        count = len(edges) - 1
        return TokenizedDocuments(
            file.read_tokens(start, stop),
            np.diff(edges),
            str(file.path),
            np.arange(first + 1, first + count + 1, dtype=np.uint64) if facts.rows is None else facts.rows,
            facts.ids,
            facts.metadata,
            fields=file.read_fields(self.fields, start, stop),
            spans=facts.spans,
        )

    def _require_boundary(self, block: TokenizedDocuments) -> None:
        """Raise `ConvertError` if a document does not end with the token that the caller has named."""
        if self._named_boundary is None:
            return
        ends = np.cumsum(block.lengths)
        is_right = block.lengths > 0
        is_right[is_right] = block.tokens[ends[is_right] - 1] == self._named_boundary
        for number in np.flatnonzero(~is_right)[:1].tolist():
            found = f"token {block.tokens[ends[number] - 1]}" if block.lengths[number] else "none"
            raise ConvertError(
                f"{row_of_source(block.source, int(block.rows[number]))}: expected a document whose last token is "
                f"{self._named_boundary}, found {found}",
                options=["boundary_token_id"],
            )


def _splits_of(files: Sequence[StreamFile], is_lone: Sequence[bool], paths: Sequence[Path]) -> list[str]:
    """Return the split of each file of several paths: as its store has it, or as its name tells.

    Parameters
    ----------
    is_lone
        Whether each file is in no store.
    """
    found = [file.split or DEFAULT_SPLIT for file in files]
    lone = [number for number, each in enumerate(is_lone) if each]
    for number, split in zip(lone, named_splits([files[number].path for number in lone], paths), strict=True):
        found[number] = split or DEFAULT_SPLIT
    if all(is_lone) and len({*found}) == 1:  # the only one
        return [DEFAULT_SPLIT] * len(files)
    return found


def _opened(found: Found, split: str | None) -> StoreCorpus:
    """Open a stream, which is compared with its digests where it has some."""
    if found.takes_digests:
        return stream_of(found, split)
    try:
        return stream_of(found, split, verify="batch")
    except UnverifiableError:
        return stream_of(found, split)


def without_documents(stream: StoreCorpus) -> str:
    """Return the words for the first file of a stream that lacks the file of its documents; "": of another format."""
    flat = flat_format(stream.backend)
    if flat is None or not flat.documents_suffix:
        return ""
    counts = list(stream.index.table.values["document_count"])
    name = stream.files[counts.index(NOT_KNOWN)].path.name
    return f" in {name}, which has no {flat.documents_suffix} beside it"


def sidecars_at(backend: str, path: Path) -> list[Path]:
    """Return the other files that belong to a file of the tokens of a stream, by the format of its files."""
    flat = flat_format(backend)
    if flat is not None:
        return flat.sidecars(path)
    table = documents_path(path)
    return [table] if table.exists() else []


def _longest_document(table: DocumentTableFile) -> int:
    """Return the tokens of the longest document of a file."""
    blocks = range(0, table.count, READ_DOCUMENTS)
    edges = (table.edges(start, min(start + READ_DOCUMENTS, table.count)) for start in blocks)
    return max((int(np.diff(each).max()) for each in edges), default=0)


def _blocks(table: DocumentTableFile, first: int, stop: int, read_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of documents that are read at once."""
    while first < stop:
        edges = table.edges(first, min(stop, first + READ_DOCUMENTS))
        whole = int(np.searchsorted(edges, edges[0] + np.uint64(read_tokens), side="right")) - 1
        end = table.within_texts(first, first + max(1, whole))
        yield first, end
        first = end


def _by_source(
    block: TokenizedDocuments, facts: DocumentRows, wanted: npt.NDArray[np.bool_] | None
) -> Iterator[TokenizedDocuments]:
    """Yield the documents that are wanted, all of one source at once."""
    sources = facts.sources
    if sources is None:
        yield block if wanted is None else block.only(wanted)
        return
    cuts = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(sources)]
    for first, stop in pairwise(cuts):
        source = int(sources[first])
        inside = np.zeros(len(sources), bool)
        inside[first:stop] = True if wanted is None else wanted[first:stop]
        if not inside.any():
            continue
        part = block if inside.all() else block.only(inside)
        yield part if source == NO_SOURCE else part._replace(source=facts.names[source])


def require_no_unfit(path: Path, meta: StoreMeta) -> None:
    """Raise `ConvertError` if values beside tokens have the name of targets, and cannot be converted with them."""
    for name, words in meta.unfit:
        raise ConvertError(
            f"{path}: expected one number for each token in {name}, found {words}; tokens_only converts the tokens "
            "alone",
            options=["tokens_only"],
        )
