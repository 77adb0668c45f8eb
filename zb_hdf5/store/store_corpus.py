"""The corpus of many files: a store, a token stream, or files of another program, by an index of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, FormatError, UnverifiableError, ZbError
from zb_hdf5.files.checked import VERIFIED
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.corpus_file import CorpusFiles
from zb_hdf5.formats.fingerprint import Fingerprint, Known, content_text, sampled_tokens
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.row_documents import stream_field
from zb_hdf5.formats.windows import Windows
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import (
    BATCHES_LAYOUT,
    LIVE_PREFIX,
    NOT_COUNTED,
    NOT_KNOWN,
    StoreMeta,
)
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_files import ShardFiles
from zb_hdf5.store.shards import Sharded
from zb_hdf5.store.store_documents import StoreDocuments, StreamDocuments

if TYPE_CHECKING:  # h5py, which a store with an index does not need
    from zb_hdf5.formats.h5_column import Column

#: The key of the stored dtype in the source of an index that is made of flat files.
FLAT_DTYPE: Final = "dtype"


class NewerFiles(Protocol):
    """Returns the index of a stream as it is now, and the facts of its files that were looked at."""

    def __call__(self) -> tuple[ShardIndex, Mapping[int, Column | FlatFacts]]: ...


class StoreCorpus(Corpus):
    """The tokens of one file or many, one after the other. See `Corpus`.

    Files are opened when they are first read (the first one now, if the index does not have the places of its tokens),
    and as many of them stay open as the process may have. Records and windows are less than a chunk of their files:
    `verify="auto"` compares none, and "batch" reads whole chunks.

    Parameters
    ----------
    path
        The folder of the store; of a stream also its `shards.json`, or its one file.
    index
        The files that are read.
    access, verify, read_as
        As for `open_corpus`.
    found
        The facts of files that were looked at, by the numbers of the files.
    records
        The cut of the tokens into the records that files of another program hold; None: as the index has them, stored
        batches or a stream.
    newer
        Looks for the files of a stream that grows; None: it does not.
    look
        The look at the first file, whose open descriptor is taken; None: it is opened.
    same_files
        The files of the tokens, of a corpus that is a field of them.
    """

    _kind: ClassVar[type[ShardFiles]] = ShardFiles
    _newer: NewerFiles | None = None

    def __init__(
        self,
        path: Path,
        index: ShardIndex,
        *,
        access: str = "auto",
        verify: str = "auto",
        read_as: ReadAs = AS_STORED,
        found: Mapping[int, Column | FlatFacts] | None = None,
        records: Windows | None = None,
        newer: NewerFiles | None = None,
        look: Look | None = None,
        same_files: ShardFiles | None = None,
    ) -> None:
        folder = path if path.is_dir() else path.parent
        name = None if folder is path else str(path)
        is_stored = index.meta.layout == BATCHES_LAYOUT
        compared = "none" if verify == "store" or (verify == "auto" and not is_stored) else verify
        files = self._kind(folder, index, access, compared, read_as, found, same_files, name=name)
        meta = index.meta if records is None else _meta_of_records(index.meta, records)
        super().__init__(path, meta, Sharded(files), backend=index.table.values["backend"][0])
        self.index = index
        self.max_token = index.max_token
        self.verify = verify
        if records is not None:
            self.foreign_dataset = read_as.dataset
        self._newer = newer
        self._shards = files
        self._checks = verify if verify == "store" else compared
        with on_failure(self.close):
            if look is not None:
                files.open_found(look)
            _ = files.access  # if the index lacks it, the error of the first shard names what cannot be read
            if compared == "batch" and index.complete:
                self._require_crc32()
            self._take(index)

    @property
    def _reads(self) -> str:
        """The way to check what is read: `verify`, where it has not compared all before."""
        return "none" if self.verify == "store" else self.verify

    def _require_crc32(self) -> None:
        """Raise `UnverifiableError` if a shard has no crc32 of its batches."""
        unknown = self.index.without_crc32()
        if not unknown:
            return
        if self.is_cut:
            self._shards.open(0, 0)  # names what is missing
            return
        raise UnverifiableError(
            f"{self._shards.folder / unknown}: cannot be verified: the index has no crc32 of its batches"
        )

    def _take(self, index: ShardIndex) -> None:
        """Take from the index what it has of all tokens, and their documents."""
        if self.is_stream:
            if self.meta.field is None:
                self._record_documents = self._documents_of(index, self._shards)
            return
        self.complete = index.complete
        if not index.complete or self.is_cut:
            return
        self.sha256 = index.sha256
        if index.documents or "pieces" in index.table.optional:
            self._record_documents = StoreDocuments(self._shards.folder, index, self._reads, self._shards.asked)

    def _documents_of(self, index: ShardIndex, shards: ShardFiles) -> StreamDocuments:
        return StreamDocuments(
            self.path,
            shards.folder,
            index,
            shards.starts,
            shards.identities,
            self._reads,
            shards.asked,
            shards.found,
            _positions_of(index, shards),
            shards,
        )

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def is_cut(self) -> bool:
        return self.index.meta.layout != BATCHES_LAYOUT

    @property
    def files(self) -> CorpusFiles:
        return self.index.files(self._shards.folder)

    @property
    def opened_files(self) -> dict[Path, Callable[[], FoundFile]]:
        """The functions that open a file for others, who read it by a copy of its descriptor, by the paths of files."""
        return {file.path: partial(self._opened_file, number) for number, file in enumerate(self.files)}

    def _opened_file(self, number: int) -> FoundFile:
        shards = self._shards
        look = None
        with suppress(ZbError, OSError):  # it is opened by its path, and whoever reads it says so
            shards.open(number, shards.starts[number])
            look = shards.begin_look(number)
        path = shards.path_of(number)
        return FoundFile(path=path, known=shards.found.get(number), look=look if isinstance(look, Look) else None)

    @property
    def file_edges(self) -> list[int]:
        return self._shards.starts

    @property
    def file_splits(self) -> Sequence[str]:
        splits: Sequence[str] = self.index.table.values["split"]
        return splits

    @property
    def source(self) -> Mapping[str, Any]:
        return self.index.source

    @property
    def compressed_files(self) -> list[tuple[CompressedTokens, int]]:
        if "codecs" not in self.index.table.optional:
            return []
        return [(each.compressed, each.token_count) for each in self.index.shards if each.compressed is not None]

    @property
    def backends(self) -> list[str]:
        return self.index.backends

    @property
    def verified(self) -> str:
        """See `Corpus`; "none" where one shard has no crc32, or still grows."""
        return "none" if self._checks == "auto" and self.index.without_crc32() else VERIFIED[self._checks]

    def _field_corpus(self, name: str) -> Corpus:
        """Return the values of a field as a corpus of its own, whose shards are the files that hold them."""
        index = self.index.of_field(name)
        records = None
        if self.windows is not None and self.is_cut:
            records = self.windows.widened(self.meta.of_field(name).seq_len // self.meta.seq_len)
        known = self._shards
        return type(self)(
            self.path,
            index,
            access=known.asked,
            verify=self.verify,
            read_as=known.read_as,
            found=known.found_of(name),
            records=records,
            same_files=known,
        )

    @property
    def joins_records(self) -> bool:
        return self.is_cut and self.meta.batch_size == 1

    def meta_of(self, windows: Windows, num_batches: int) -> StoreMeta:
        if not self.is_stream:
            return super().meta_of(windows, num_batches)
        stream = self.meta
        return StoreMeta(
            windows.size,
            windows.length,
            stream.dtype,
            total_records=num_batches * windows.size,
            vocab_size=stream.vocab_size,
            tokenizer=stream.tokenizer,
            fields=stream.fields,
            field=stream.field,
            unfit=stream.unfit,
        )

    def compared_tokens(self) -> Tokens | None:
        if self.verify != "auto" or not self.is_cut:
            return super().compared_tokens()
        known = self._shards
        if self.index.read_as is not None and not self.index.digests:
            return None  # files of other programs without made digests
        asked = (known.asked, "batch", known.read_as, known.found)
        files = ShardFiles(known.folder, self.index, *asked, same_files=known, identities=known.identities)
        try:
            files.open(0, 0)
        except UnverifiableError:
            return None
        return Sharded(files)

    # --- identity ------------------------------------------------------------------------------------------------

    @property
    def known_as(self) -> Fingerprint:
        return Fingerprint(self._known_by, self._content, self._sample, self.index.table.values["sha256"])

    @property
    def _known_by(self) -> Known:
        if self.index.live_id:
            return Known.LIVE
        if not self.is_cut:
            return Known.STORED
        if self._is_lone_hdf5:
            return Known.LONE  # as the file alone, so that states fit it
        return Known.STREAM if self.is_stream else Known.RECORDS

    def _content(self) -> str:
        if self.index.live_id:
            return f"{LIVE_PREFIX}{self.index.live_id}"
        return content_text(self.index.sha256, self.dtype) if self.index.has_digests else ""

    @property
    def _is_lone_hdf5(self) -> bool:
        return self.foreign_dataset is not None and len(self.index.shards) == 1

    def _sample(self) -> str:
        of_flat_files = self.index.source.get(FLAT_DTYPE)
        if of_flat_files is None:
            return super()._sample()
        return sampled_tokens(self.tokens, self.file_edges, np.dtype(of_flat_files))

    # --- splits --------------------------------------------------------------------------------------------------

    def split(self, name: str | None) -> Corpus:
        """Open one split of the same path. See `Corpus`.

        Raises
        ------
        FormatError
            If the path has another store now.
        """
        found = super().split(name)
        with on_failure(found.close):
            if self.training_split is not None and isinstance(found, StoreCorpus):
                self._require_part(found.index)
        return found

    def _require_part(self, split: ShardIndex) -> None:
        """Raise `FormatError` unless the shards of a split are some of these, which are the shards of all splits."""
        mine = self.index
        others = {*split.table.values["sha256"]} - {*mine.table.values["sha256"]}
        if split.live_id != mine.live_id or (others and not mine.live_id):
            raise FormatError(
                f"{self.path}: was replaced since it was opened: its shards are others now; open it again"
            )

    # --- the documents of a stream -------------------------------------------------------------------------------

    @property
    def has_documents(self) -> bool:
        """Whether it is stored where the documents of a stream begin; else each file counts as one."""
        return bool((self.index.table.values["document_count"] != NOT_KNOWN).all())

    @property
    def told_by(self) -> str:
        """The field that tells the documents of a stream apart; "": their ends are stored, or nothing tells them."""
        return _told_by(self.index) if self.is_stream else ""

    @property
    def document_count(self) -> int:
        """Documents of a stream, and of records with documents; 0: of others.

        Of OLMo files, the `.csv.gz` of each is read for it at the first call.
        """
        if not (self.is_stream or self.has_documents):
            return 0
        documents = self._record_documents
        if not isinstance(documents, StreamDocuments):  # the values of a field
            documents = self._documents_of(self.index, self._shards)
        return int(documents.counts().sum())

    @property
    def doc_offsets(self) -> npt.NDArray[np.uint64]:
        """The start of each document of a stream and the end of the last one, in its tokens, shape (D + 1,).

        Read from all files at the first call, and kept: 8 bytes for each. `.npy` files have no documents: each counts
        as one.
        """
        if not isinstance(self._record_documents, StreamDocuments):
            raise ArgumentError(f"{self.path}: expected tokens, found the values of a field")
        return self._record_documents.edges()

    # --- a stream that grows -------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Show the tokens that were committed since the corpus was opened; return `num_tokens`.

        Any thread may call it while others read: they see tokens before the documents of these, and documents before
        the numbers of both. A file that was open closes when no thread reads from it any more.

        Raises
        ------
        FormatError
            If this is another stream now.
        """
        if self._newer is None or self.is_cached:  # a cache is of a finished stream
            return self.num_tokens
        with self._changing:
            index, found = self._newer()
            if index.token_count < self.num_tokens:
                raise FormatError(
                    f"{self.path}: was replaced: expected at least {self.num_tokens:,} tokens, found "
                    f"{index.token_count:,}; open it again"
                )
            files = self._shards.reopened(index, found)
            _ = files.access  # an error changes nothing
            documents = self._documents_of(index, files)
            self._shards = files
            self.tokens = tokens = Sharded(files)
            self._record_documents = documents
            self.index = index
            self.max_token = index.max_token
            self.meta = index.meta
            self._other_fields += self._fields.values()  # other threads may read from them
            self._fields = {}
            self.num_tokens = tokens.num_tokens
        return self.num_tokens


def _told_by(index: ShardIndex) -> str:
    """Return the field that tells the documents of a stream apart. See `StoreCorpus.told_by`."""
    is_told = bool((index.table.values["document_count"] == NOT_COUNTED).all())
    return stream_field(index.meta.fields) if is_told else ""


def _positions_of(index: ShardIndex, shards: ShardFiles) -> Tokens | None:
    """Return the values that tell the documents of a stream of another program apart; None: none do."""
    name = _told_by(index)
    if not name:
        return None
    asked = (shards.asked, "none", shards.read_as)
    files = ShardFiles(shards.folder, index.of_field(name), *asked, same_files=shards, identities=shards.identities)
    return Sharded(files)


def require_stream(corpus: Corpus) -> StoreCorpus:
    """Return a corpus that is a token stream.

    Raises
    ------
    FormatError
        If it holds batches; then it is closed.
    """
    if isinstance(corpus, StoreCorpus) and corpus.is_stream:
        return corpus
    corpus.close()
    raise FormatError(f"{corpus.path}: expected a token stream, found batches; open_reader opens them")


def _meta_of_records(stored: StoreMeta, records: Windows) -> StoreMeta:
    """Return the facts of records that are cut out of the chunks of files."""
    return StoreMeta(
        records.size, records.length, stored.dtype, fields=stored.fields, field=stored.field, unfit=stored.unfit
    )
