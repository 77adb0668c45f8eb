"""A corpus, which is what a path holds: tokens, fields and documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self, TypeAlias

import numpy as np

from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.documents.record_documents import RecordDocuments
from zb_hdf5.errors import ArgumentError, BackendError, UnverifiableError, counted, require_choice, whole_number
from zb_hdf5.field import SET_MARK, Field
from zb_hdf5.files.checked import GROUP_BYTES, VERIFIED, Crc32Rows, checked
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.forks import OwnLock
from zb_hdf5.files.large_array import large_array
from zb_hdf5.files.paths import any_path, on_failure
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.threads import raise_if_cancelled
from zb_hdf5.files.tokens import ClosedTokens, Tokens, corpus_closed
from zb_hdf5.formats.access import VERIFIES
from zb_hdf5.formats.batch_digests import BatchDigests
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus_documents import CorpusDocuments
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.formats.fingerprint import Fingerprint, Known, content_text, sampled_tokens
from zb_hdf5.formats.windows import Windows
from zb_hdf5.spec import BATCHES, BATCHES_LAYOUT, DEFAULT_SPLIT, SAMPLED_AS, STREAM_LAYOUT, StoreMeta, TokenArray

#: The kinds of attributes that a pickled corpus leaves out where they are those of its class.
_PLAIN: Final = (str, bool, type(None))


class FieldSource(Protocol):
    """A field set that fits the tokens of a corpus."""

    def corpus_of(self, name: str) -> Corpus: ...


class OpenedAs(Protocol):
    """The path of a corpus, and how it was opened: `how` has the arguments of `open_corpus` but for path and cache."""

    @property
    def path(self) -> str | os.PathLike[str]: ...

    @property
    def how(self) -> Mapping[str, Any]: ...

    def open(self, split: str | None) -> Corpus: ...


class Corpus:
    """The tokens that a path holds, or the values of a field, with their fields and documents; opened lazily.

    Thread-safe, `refresh` too; usable after fork; picklable (a copy reopens the files by their paths). `close` must not
    race with reads. Nothing but `refresh` changes it. Two corpora are equal if they are the same object: `same_as`
    compares their tokens.

    Parameters
    ----------
    path
        The opened path.
    meta
        The stored shape, dtype and origin.
    tokens
        The tokens by their positions: `corpus.tokens[a:b]`.
    num_tokens
        The tokens that are committed, which never become fewer; None: all.
    backend
        The format of the files; None: that of the class.
    complete
        False while a writer is still at work; then `refresh` may find more.

    Attributes
    ----------
    path, meta, tokens, num_tokens, backend, complete
        As they were given.
    windows
        The cut of the tokens into the batches that are stored; None: the tokens are one stream.
    verify
        As `with_verify` has got it.
    sha256
        Digest of the token bytes, or None where none is stored.
    extents
        Extents of the batches in the one file, or None if they are in several or have no plain extents.
    columns
        Ranges of the chunks of each column in the one file, if they may be looked for without HDF5.
    compressed
        The codec of the tokens of the one file, and the bytes that they take; None: they are not compressed.
    max_token
        The largest id, of a file or store that is complete and has it; None: not known.
    foreign_dataset
        Name of the dataset of another program that holds the tokens; None in files of ours.
    origin
        "source", "shuffle" and "split" of the tokens, where a file has them.
    training_split
        The split that a loader reads, of a corpus that has others too; None: all that it has.
    is_cached
        Whether its tokens are kept in a cache.
    added_sets
        The names of the field sets that `with_fields` has added.
    about
        The token that a value of a field set is about: "next" is the token after its own, "token" is its own; "" of
        other corpora.
    words
        The words of the codes of a field set; empty where it has no codes.
    windows_of_set
        The windows of a stream that the values of a field set were made of; None: it has none.
    """

    backend: str
    complete: bool = True
    verify: str = "none"
    _checks: str = "none"
    about: str = ""
    windows_of_set: Windows | None = None
    words: tuple[str, ...] = ()
    compressed: CompressedTokens | None = None
    foreign_dataset: str | None = None
    added_sets: tuple[str, ...] = ()
    documents_sha256 = ""
    sha256: str | None = None
    max_token: int | None = None
    extents: Extents | None = None
    windows: Windows | None = None
    training_split: str | None = None
    _record_documents: RecordDocuments | None = None
    _cache: Callable[[Corpus], Tokens] | None = None
    _opened: OpenedAs | None = None
    _find_set: FindSet | None = None
    #: The cure of damage that digests find, for its message.
    cure: ClassVar[str] = "restore it, repair it, or convert again"

    def __init__(
        self,
        path: Path,
        meta: StoreMeta,
        tokens: Tokens,
        num_tokens: int | None = None,
        *,
        backend: str | None = None,
        complete: bool = True,
    ) -> None:
        self.path = path
        self.meta = meta
        self.tokens = tokens
        self.num_tokens = tokens.num_tokens if num_tokens is None else num_tokens
        if meta.layout == BATCHES_LAYOUT:
            self.windows = Windows(meta.batch_size, meta.seq_len, meta.seq_len)
        if backend is not None:
            self.backend = backend
        self.complete = complete
        self.verify = self._checks = "none"
        self._begin()

    def _begin(self) -> None:
        """Set the attributes that are empty at first: a pickled corpus leaves them out as long as they are."""
        self.columns: dict[str, tuple[Run, ...]] = {}
        self.origin: dict[str, Any] = {}
        self._fields: dict[str, Corpus] = {}
        #: Fields of a stream before it grew, and of field sets: the latter of all corpora with the same files.
        self._other_fields: list[Corpus] = []
        self._changing = OwnLock()  # by a refresh, or a field that is opened
        self._sets: dict[str, FieldSource] = {}  # by the names of field sets

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def is_stream(self) -> bool:
        """Whether the tokens are one long sequence; else they are stored as records in batches."""
        return self.windows is None

    @property
    def layout(self) -> str:
        """The way that the tokens are stored: "batches" or "stream"."""
        return STREAM_LAYOUT if self.windows is None else BATCHES_LAYOUT

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.meta.dtype

    @property
    def document_count(self) -> int:
        """The documents that are counted; 0: none are."""
        return self.meta.document_count

    @property
    def num_units(self) -> int:
        """Stored batches or chunks that are committed. The last chunk of a stream may hold fewer tokens than others."""
        return -(-self.num_tokens // self.meta.batch_tokens)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the tokens."""
        return self.meta.fields

    @property
    def files(self) -> Sequence[CorpusFile]:
        """The files that hold the tokens, in order, with the tokens and the digests of each. None is opened for it."""
        return [CorpusFile(self.path.parent, self.path.name, self.num_tokens, self.sha256)]

    @property
    def file_edges(self) -> list[int]:
        """The positions where the tokens of each file begin, and where the last file ends."""
        return [0, self.num_tokens]

    @property
    def file_splits(self) -> Sequence[str]:
        """The split of the tokens of each file."""
        return [str(self.origin.get("split") or DEFAULT_SPLIT)]

    @property
    def source(self) -> Mapping[str, Any]:
        """The source that the tokens were converted from: its "format", its "files" and others; empty: not known."""
        return self.origin.get("source") or {}

    @property
    def compressed_files(self) -> list[tuple[CompressedTokens, int]]:
        """The codec of each file whose tokens are compressed, and the number of these."""
        return [] if self.compressed is None else [(self.compressed, self.num_tokens)]

    @property
    def backends(self) -> list[str]:
        """The formats of the files, each once, in their order."""
        return [self.backend]

    @property
    def is_cut(self) -> bool:
        """Whether batches are cut out of the tokens of the files, and are not units of these."""
        return self.meta.layout != BATCHES_LAYOUT

    @property
    def access(self) -> str:
        """The I/O path as asked for: "auto", "mmap", "pread", "h5py"; "h5py" too where only HDF5 can read it.

        "remote": of objects, by ranges.
        """
        return self.tokens.access

    @property
    def verified(self) -> str:
        """The reads that are compared with their crc32.

        "whole reads": batches that are read into a buffer, but no views of a mapping, and no records. "all reads".
        "none", also where no crc32 is stored. "store": all digests were compared once, when it was opened.
        """
        return VERIFIED[self._checks]

    @property
    def is_cached(self) -> bool:
        return self._cache is not None

    # --- identity ------------------------------------------------------------------------------------------------

    @property
    def known_as(self) -> Fingerprint:
        """The fingerprints of the tokens: alone, in batches, as documents, and in a cache."""
        by = Known.LONE if self.sha256 is None else Known.STORED
        return Fingerprint(by, self._content, self._sample, () if self.sha256 is None else (self.sha256,))

    @property
    def fingerprint(self) -> str:
        """Identity of the tokens, whatever the shape of their batches. It never changes for the same tokens."""
        return self.known_as.of_tokens

    def _content(self) -> str:
        """Return the fingerprint of tokens with a stored digest; "": no digest is stored."""
        return "" if self.sha256 is None else content_text(self.sha256, self.dtype)

    def _sample(self) -> str:
        """Return the fingerprint of tokens without a stored digest."""
        return sampled_tokens(self.tokens, self.file_edges, SAMPLED_AS.get(self.dtype, self.dtype))

    def same_as(self, other: Corpus) -> bool:
        """Return whether another corpus has the same fingerprint: see `fingerprint`.

        True proves the same tokens where the fingerprint is a digest. One that begins with "sampled:", of files without
        digests, covers their sizes and some of their tokens: others may differ. False proves nothing: the same tokens
        in other files, in another dtype, or once with and once without digests have other fingerprints.

        Raises
        ------
        ArgumentError
            If the other one is not a corpus, such as a path.
        """
        if not isinstance(other, Corpus):
            raise ArgumentError(
                f"{self.path}: other must be a corpus, such as open_corpus(path) returns, found {other!r:.80}"
            )
        return self is other or self.fingerprint == other.fingerprint

    # --- fields and documents ------------------------------------------------------------------------------------

    def field(self, name: str) -> Corpus:
        """Return the values of a field, aligned with the tokens: each token has `field.size` of them.

        Its `meta.field` has their dtype and shape. It is opened once, and closed with this corpus.

        Raises
        ------
        ArgumentError
            If no such field is stored.
        """
        found = self._fields.get(name)
        if found is None:
            with self._changing:
                found = self._fields.get(name)
                if found is None:
                    found = self._open_field(name)
        return found

    def _open_field(self, name: str) -> Corpus:
        self.require_open()
        set_name, mark, field = name.partition(SET_MARK)
        if mark:
            found = self._field_set(set_name).corpus_of(field)
            if self._cache is not None:
                found = found.cached(self._cache)
            self._other_fields.append(found)
            self._fields[name] = found
            return found
        if self.tokens_only:
            raise ArgumentError(f"{self.path}: expected a field, found {name!r}: {self.tokens_only}")
        try:
            self.meta.of_field(name)  # its error names the fields that are stored
        except ArgumentError as error:
            raise ArgumentError(f"{self.path}: {error}") from None
        found = self._field_corpus(name)
        if self._cache is not None:
            found = found.cached(self._cache)
        self._fields[name] = found
        return found

    def with_fields(
        self,
        name: str,
        *,
        path: str | os.PathLike[str] | None = None,
        allow_missing: Mapping[str, float] | None = None,
    ) -> Corpus:
        """Return this corpus with the fields of a field set, which was made later: "teacher/logprobs" is one of them.

        It shares the files of this one: close one of the two, at the end. A field set that lies with the tokens needs
        no such call: `corpus.field("teacher/logprobs")` finds it.

        Parameters
        ----------
        name
            The name of the set.
        path
            The folder of the set, or its URL; None: where the sets of this corpus lie.
        allow_missing
            The value of each field in records that are missing, by its name: then the set need not be finished.
            Records that are written later change nothing in the corpus that was returned. None: none may be missing.

        Raises
        ------
        NotFoundError
            If there is no such set.
        ChecksumError
            If its values belong to other tokens.
        IncompleteError
            If values are missing.
        """
        kept = {key: value for key, value in self._fields.items() if not key.startswith(f"{name}{SET_MARK}")}
        sets = {**self._sets, name: self._found_set(name, path, allow_missing)}
        return self._with(
            _changing=OwnLock(),
            _fields=kept,
            _other_fields=self._other_fields,  # either one closes them
            _sets=sets,
            added_sets=(*self.added_sets, name),
        )

    def _field_set(self, name: str) -> FieldSource:
        """Return a field set by its name."""
        if name not in self._sets:
            self._sets[name] = self._found_set(name, None, None)
        return self._sets[name]

    def _found_set(
        self, name: str, path: str | os.PathLike[str] | None, allow_missing: Mapping[str, float] | None
    ) -> FieldSource:
        if self._find_set is None:
            raise ArgumentError(f"{self.path}: expected a corpus of open_corpus, to find its field set {name!r}")
        return self._find_set(self, name, None if path is None else any_path(path), allow_missing)

    @property
    def tokens_only(self) -> str:
        """The reason why no fields and documents are there; "" in formats that hold them."""
        text = "backend 'batch' holds tokens and nothing else: open the HDF5 store of the same tokens, backend='hdf5'"
        return text if self.backends == ["batch"] else ""

    def _field_corpus(self, name: str) -> Corpus:
        raise ArgumentError(f"{self.path}: cannot be read with its fields")

    @property
    def documents(self) -> CorpusDocuments | None:
        """The documents of the tokens, by their numbers.

        A stream always has some: each of its files is one document where nothing tells them apart, as in a 1-D `.npy`
        file, and a `DocumentLoader` reads these. None: records, without documents stored with them.
        """
        table = self.document_table
        return None if table is None else CorpusDocuments(self, table)

    @property
    def document_table(self) -> DocumentTable | None:
        """The table of the documents, by the offsets of tokens; None where none is stored."""
        return None if self._record_documents is None else self._record_documents.documents()

    def require_documents(self) -> DocumentTable:
        """Return the table of the documents; `BackendError` if none is stored."""
        table = self.document_table
        if table is None:
            raise BackendError(f"{self.path}: holds no documents")
        return table

    @property
    def record_documents(self) -> RecordDocuments | None:
        """The parts of documents in records; None where none are stored."""
        return self._record_documents

    @property
    def has_pieces(self) -> bool:
        """Whether the pieces of documents in the records are stored, or follow from the offsets of the documents."""
        return self._record_documents is not None and self._record_documents.has_pieces

    # --- batches -------------------------------------------------------------------------------------------------

    def batches(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        stride: int | None = None,
        *,
        context_targets: bool = True,
    ) -> Batches:
        """Return the tokens as batches of records.

        Parameters
        ----------
        batch_size
            Records of a batch. None: as they are stored.
        seq_len
            Tokens of a record. None: as they are stored.
        stride
            Tokens from one record of a stream to the next. None: `seq_len`, so that no two records share a token. A
            loader with targets reads one token more for each record, which is the target of the last one.
        context_targets
            False: a loader gives the first `seq_len - stride` targets of each record of a stream but the first one as
            -100: their tokens are there as context, and each token is a target exactly once. Stored batches share no
            tokens: nothing changes for them.

        Raises
        ------
        ArgumentError
            If a stream has no shape, or one that is not possible, or stored batches have another one.
        ClosedError
            If the corpus was closed.
        """
        windows = self.windows_of(batch_size, seq_len, stride)
        return Batches(
            self, windows, reads_targets=self.is_stream, num_context=0 if context_targets else windows.overlap
        )

    def windows_of(self, batch_size: int | None, seq_len: int | None, stride: int | None = None) -> Windows:
        """Return the cut of the tokens into records and batches. Takes and raises as `batches`."""
        self.require_open()
        asked = {"batch_size": batch_size, "seq_len": seq_len, "stride": stride}
        asked = {name: None if size is None else whole_number(name, size) for name, size in asked.items()}
        batch_size, seq_len, stride = asked.values()
        stored = self.windows
        if stored is None:
            if batch_size is None or seq_len is None:
                missing = "batch_size and seq_len" if batch_size is None else "seq_len"
                raise ArgumentError(f"{self.path}: is a token stream: pass {missing} for windows over it")
            for name, size in {"batch_size": batch_size, "seq_len": seq_len}.items():
                if size < 1:
                    raise ArgumentError(f"{self.path}: {name} must be at least 1, found {size}", options=[name])
            if stride is not None and not 1 <= stride <= seq_len:
                raise ArgumentError(
                    f"{self.path}: stride must be 1 to {seq_len:,}, as a record has, found {stride}: between records "
                    "no tokens are left out"
                )
            return Windows(batch_size, seq_len, seq_len if stride is None else stride)
        if self.joins_records and batch_size is not None:
            stored = stored.resized(batch_size)
        for name, expected in {"batch_size": stored.size, "seq_len": stored.length, "stride": stored.stride}.items():
            if asked[name] not in (None, expected):
                raise ArgumentError(
                    f"{self.path}: expected {name}={expected}, as its batches are stored, found {asked[name]}; leave "
                    "it out, or let a loader cut and join the records",
                    options=[name],
                )
        return stored

    @property
    def joins_records(self) -> bool:
        """Whether its records are stored one by one by another program, so that any number of them is a batch."""
        return self.foreign_dataset is not None and self.meta.batch_size == 1

    def meta_of(self, windows: Windows, num_batches: int) -> StoreMeta:
        """Return the facts of batches of the tokens.

        Parameters
        ----------
        windows
            The cut of the tokens.
        num_batches
            The whole batches that it has.
        """
        return self.meta if windows.size == self.meta.batch_size else replace(self.meta, batch_size=windows.size)

    # --- digests -------------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[tuple[int, TokenArray]]:
        """Yield all stored batches as digests cover them, many at a time, with the number of the first.

        Shape `(count, B, S)`; of a last chunk that holds fewer tokens `(1, 1, tokens)`. The array is used again for the
        next group. In a thread of `ReadPool` it ends by `WorkCancelled` between two groups, when nobody waits for it.
        """
        unit = self.meta.batch_tokens
        group = large_array((max(1, GROUP_BYTES // self.meta.batch_bytes), *self.meta.shape), self.tokens.dtype)
        whole, rest = divmod(self.num_tokens, unit)
        for start in range(0, whole, len(group)):
            raise_if_cancelled()
            batches = group[: min(len(group), whole - start)]
            self.tokens.read([(start * unit, batches.reshape(-1))])
            yield start, batches
        if rest:
            last = group[:1, :, :rest]
            self.tokens.read([(whole * unit, group.reshape(-1)[:rest])])
            yield whole, last

    @property
    def digests(self) -> BatchDigests:
        """The digests that are stored with this file, and their comparison with its batches."""
        return BatchDigests(self)

    def missing_digests(self) -> str:
        """Return the reason why this file cannot be verified, if it has no digest; else an empty text."""
        return "no digest is stored with it; convert it to a store, which keeps digests from then on"

    def crc32_rows(self) -> Crc32Rows | None:
        """Return the crc32 of each batch as stored with this file, read when they are needed; None where none are."""
        return None

    def other_checks(self) -> list[str]:
        """Check the parts of the file beside its batches and their digests; return the names of the checks."""
        return []

    def with_verify(self, verify: str) -> Self:
        """Return this corpus with reads that are compared with digests, as `verify` of `open_reader` asks.

        It takes the place of this one, which an error closes. The opening of a file ends with this.

        Raises
        ------
        ChecksumError
            If `verify="store"` finds other bytes.
        UnverifiableError
            If "batch" or "store" has nothing to compare with.
        """
        with on_failure(self.close):
            require_choice("verify", verify, VERIFIES)
            found = self._with(verify=verify)  # nobody else has it before this method ends
            sha256 = found.digests.require() if verify == "store" else self.sha256
            rows = found.crc32_rows() if verify in ("auto", "batch") else None
            if verify == "batch":
                if rows is None:
                    raise UnverifiableError(f"{self.path}: cannot be verified: {self.missing_digests()}")
                if self.num_units:
                    rows.all()  # damaged ones are an error now
            checks = "none" if rows is None and verify != "store" else verify
            tokens = checked(self.tokens, rows, self.path, self.meta.noun, verify, self.meta.batch_tokens)
            found.tokens = self._as_read(tokens)
            found.sha256 = sha256
            found._checks = checks
            return found

    def _as_read(self, tokens: Tokens) -> Tokens:
        """Return tokens that were compared as they were stored, as they are read."""
        return tokens

    def compared_tokens(self) -> Tokens | None:
        """Return tokens that compare each unit that is read whole with its crc32; None where none are compared."""
        return self.tokens if self.verified in ("whole reads", "all reads") else None

    @property
    def tokens_of_unit(self) -> int:
        """The tokens that a unit has, or has the values of."""
        return self.tokens.unit // (1 if self.meta.field is None else self.meta.field.size)

    @property
    def column_in_cache(self) -> str:
        """The name of these tokens or values among all that a cache keeps of the same tokens."""
        return BATCHES if self.meta.field is None else self.meta.column

    def cached(self, cache: Callable[[Corpus], Tokens]) -> Corpus:
        """Return this corpus with its tokens in a cache, and its fields when they are opened.

        It takes the place of this one, which nobody uses or closes any more.

        Parameters
        ----------
        cache
            Returns the tokens of a corpus as they are read through a cache, which closes them with its own; or the very
            tokens of the corpus, if the cache cannot serve.
        """
        tokens = cache(self)
        if tokens is self.tokens:
            return self
        return self._with(tokens=tokens, _cache=cache, _fields={})

    # --- the life of a corpus ------------------------------------------------------------------------------------

    def _with(self, **changed: Any) -> Self:
        """Return a copy that has other attributes and shares the files: one of the two is closed, at the end."""
        found = object.__new__(type(self))
        with self._changing:
            found.__dict__.update(self.__dict__, _fields=dict(self._fields), _other_fields=[])
        found.__dict__.update(changed)
        return found

    def with_documents(self, documents: RecordDocuments) -> Self:
        """Return this corpus with the documents of its tokens, which close with it. It takes the place of this one."""
        return self._with(_record_documents=documents)

    def opened_by(
        self,
        find_set: FindSet,
        opened: OpenedAs | None = None,
        training_split: str | None = None,
    ) -> Self:
        """Return this corpus with the ways to its field sets and splits. It takes the place of this one.

        Parameters
        ----------
        find_set
            Finds a field set.
        opened
            The path, by which its splits are opened too; None: it is not opened again.
        training_split
            The split that a loader reads; None: all that it has.
        """
        return self._with(_find_set=find_set, _opened=opened, training_split=training_split)

    @property
    def opened(self) -> OpenedAs:
        """The path, and how it was opened.

        Raises
        ------
        ArgumentError
            If these are the values of a field, which no path has.
        ClosedError
            If the corpus was closed.
        """
        self.require_open()
        if self._opened is None:
            raise ArgumentError(f"{self.path}: expected a corpus of open_corpus, found the values of a field")
        return self._opened

    def require_open(self) -> None:
        """Raise `ClosedError` if this corpus was closed."""
        if isinstance(self.tokens, ClosedTokens):
            raise corpus_closed(self.path)

    def split(self, name: str | None) -> Corpus:
        """Open one split of the same path, as `open_corpus` does; the caller closes it.

        Parameters
        ----------
        name
            "train", "val" or "test", by any of the words of `SPLIT_OF_WORD`; None or "all": all.

        Raises
        ------
        ArgumentError
            If the path has no such split.
        """
        if self._opened is None:
            raise ArgumentError(f"{self.path}: expected a corpus of open_corpus, to find its split {name!r}")
        return self._opened.open(name)

    def refresh(self) -> int:
        """Show the tokens that a writer has committed since; return `num_tokens`. A published file has none."""
        return self.num_tokens

    def close(self) -> None:
        """Release the files, and the files of the fields. Views that were returned stay valid."""
        for field in (*self._fields.values(), *self._other_fields):
            field.close()
        self._fields = {}
        self._other_fields.clear()
        self.tokens.close()
        if self._record_documents is not None:
            self._record_documents.close()
        self.tokens = ClosedTokens(self.tokens)

    def __getstate__(self) -> dict[str, Any]:
        # at one moment: counts of a copy are never ahead of its tokens, which are pickled later
        with self._changing:
            state = {**self.__dict__, "_fields": dict(self._fields), "_other_fields": []}
        del state["_changing"]
        kind = type(self)
        at_first = object.__new__(kind)
        at_first._begin()
        empty = vars(at_first)
        return {
            name: value
            for name, value in state.items()
            if (name not in empty or value) and not (isinstance(value, _PLAIN) and value == getattr(kind, name, ...))
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update(state)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        windows = self.windows
        kind = "a token stream" if windows is None else f"batches of {windows.size:,} x {windows.length:,}"
        size = f"{counted(self.num_tokens, 'token')} of {self.dtype.name} in {counted(len(self.files), 'file')}"
        fields = ", ".join(field.name for field in self.fields) or "none"
        how = f"access={self.access!r}, compared with a crc32: {self.verified}"
        return f"{type(self).__name__}({str(self.path)!r})\n  {kind}: {size}\n  fields: {fields}; {how}"


#: Finds a field set of a corpus by its name, in a folder or where its sets lie; with the values of missing records.
FindSet: TypeAlias = Callable[[Corpus, str, Path | None, Mapping[str, float] | None], FieldSource]
