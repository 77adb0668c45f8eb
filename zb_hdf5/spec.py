"""The meaning of the bytes: every magic number, offset, name, key, version and limit on disk.

Nothing here opens a file. The tables of docs/formats.md are tested against this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ConvertError
from zb_hdf5.field import Field

TokenArray = npt.NDArray[Any]
U32_MAX: Final = 2**32 - 1

# --- codecs of HDF5 chunks -------------------------------------------------------------------------------------


class CodecFacts(NamedTuple):
    """The number of the registered HDF5 filter of a codec, and its levels."""

    filter_id: int
    default_level: int
    max_level: int


#: The codec of a store without compression.
NO_CODEC: Final = "none"
CODECS: Final = {"gzip": CodecFacts(1, 6, 9), "zstd": CodecFacts(32015, 3, 22)}


def codec_named(text: str | None) -> str:
    """Return a codec with its level, as it is stored: "zstd" is "zstd:3", None is "none"."""
    if text in (None, NO_CODEC):
        return NO_CODEC
    name, _, level = str(text).partition(":")
    facts = CODECS.get(name)
    if facts is None:
        raise ArgumentError(f"codec must be {NO_CODEC}, or one of {', '.join(CODECS)} with a level, found {text!r}")
    if level and not (level.isascii() and level.isdecimal() and 1 <= int(level) <= facts.max_level):
        raise ArgumentError(f"codec {name} has levels 1 to {facts.max_level}, found {text!r}")
    return f"{name}:{int(level or facts.default_level)}"


# --- tokens ----------------------------------------------------------------------------------------------------


class TokenDtype(NamedTuple):
    """A dtype of stored tokens, and its code in a `.batch` header; None: no such file has it."""

    dtype: np.dtype[Any]
    batch_code: int | None


#: The dtypes of stored tokens, by their names. Code 0 of `.batch` is ZeroBatch v2's; code 1 is ours.
TOKEN_DTYPES: Final[dict[str, TokenDtype]] = {
    "uint32": TokenDtype(np.dtype("<u4"), 0),
    "uint16": TokenDtype(np.dtype("<u2"), 1),
    "uint8": TokenDtype(np.dtype("u1"), None),
}
DTYPE_BY_NAME: Final[dict[str, np.dtype[Any]]] = {name: each.dtype for name, each in TOKEN_DTYPES.items()}
DTYPE_BY_CODE: Final[dict[int, np.dtype[Any]]] = {
    each.batch_code: each.dtype for each in TOKEN_DTYPES.values() if each.batch_code is not None
}
CODE_BY_DTYPE: Final[dict[np.dtype[Any], int]] = {dtype: code for code, dtype in DTYPE_BY_CODE.items()}
#: The dtype that ids of one byte have in a fingerprint which is a sample: they were read so before they had one of
#: their own, and states and caches have such fingerprints.
SAMPLED_AS: Final[dict[np.dtype[Any], np.dtype[Any]]] = {DTYPE_BY_NAME["uint8"]: DTYPE_BY_NAME["uint32"]}

# --- native `.batch`, version 1 (ZeroBatch v2) -----------------------------------------------------------------

BATCH_MAGIC: Final = b"LLMBATCH"
BATCH_VERSION: Final = 1
HEADER_BYTES: Final = 4096
PAGE_BYTES: Final = 4096

# --- HDF5 batch store, version 3 -------------------------------------------------------------------------------

HDF5_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
#: The offsets of the magic: after a block of the user each is twice the one before it; nobody has more than 1 MiB.
HDF5_OFFSETS: Final = (0, *(512 << doubled for doubled in range(12)))
HDF5_FORMAT: Final = "zb-batches"
HDF5_VERSION: Final = 3  # of batch stores and of token streams
HDF5_LIBVER: Final = ("v110", "v110")  # can enter SWMR, and HDF5 1.10 can still read it
HDF5_ALIGNMENT: Final = PAGE_BYTES
BATCHES: Final = "batches"
CRC32: Final = "crc32"
CRC32_CHUNK_ROWS: Final = 4096  # 16 KiB: what one commit rewrites
#: The table of a compressed column: the byte offset of each chunk, and the bytes that it takes. A chunk that takes as
#: many bytes as it has without compression is stored without it.
EXTENTS: Final = "extents"
EXTENTS_CHUNK_ROWS: Final = 1024  # 16 KiB
#: Attributes of the root group, all written before SWMR starts.
ROOT_ATTRIBUTES: Final = ("format", "format_version", "creator", "description", "batch_size", "seq_len")
#: Attributes of the root group that are absent where their value is unknown (0 or "" in a `StoreMeta`).
OPTIONAL_ATTRIBUTES: Final = ("seed", "total_records", "document_count", "vocab_size", "tokenizer")
#: Attributes of the root group that describe the origin of the tokens, absent where that is unknown. `source` is the
#: JSON text of the entry of the same name in `shards.json`; the last three are copies of its keys.
ORIGIN_ATTRIBUTES: Final = (
    "source",
    "shuffle",
    "split",
    "packing",
    "boundary_token_id",
    "pad_id",
)
FORMAT_PAGE: Final = "https://github.com/zb-hdf5/zb_hdf5/blob/main/docs/formats.md"
#: Layout -> `description` of the root group.
DESCRIPTIONS: Final = {
    "batches": "Token ids for the training of language models, in batches of records. Batch i of 'batches' is valid if "
    "i < num_batches, an attribute of 'batches'; while a writer is at work, the shape is larger. crc32[i] is "
    f"zlib.crc32 of the bytes of batch i. Format: {FORMAT_PAGE}",
    "stream": "Token ids for the training of language models, one document after the other: document d is "
    "tokens[doc_offsets[d]:doc_offsets[d + 1]]. Token i is valid if i < token_count, an attribute of 'tokens'; while a "
    f"writer is at work, the shape is larger. crc32[i] is zlib.crc32 of the bytes of chunk i. Format: {FORMAT_PAGE}",
}
#: Labels of the axes of `batches`, and of the first axes of its fields.
BATCHES_LABELS: Final = ("batch", "record", "token")
#: A longer text of `source` names its lists by their lengths: an attribute cannot hold many file names.
MAX_SOURCE_CHARS: Final = 4096
#: Attributes of `batches`, all created before SWMR starts with a fixed-size type and only modified after.
#: With DIMENSION_LABELS at most 8: above that HDF5 stores them densely, and their update is no longer one write.
BATCHES_ATTRIBUTES: Final[dict[str, np.dtype[Any]]] = {
    "num_batches": np.dtype("<u8"),  # the commit marker: batch i exists iff i < num_batches
    "token_count": np.dtype("<u8"),
    "max_token": np.dtype("<u8"),
    "sha256": np.dtype("S64"),  # 64 zeros until complete
    "complete": np.dtype("u1"),
}
#: The group of the data sets of fields. Each has one chunk for each batch, and axes for the values of a token last.
FIELDS_GROUP: Final = "fields"
#: Attributes of a field.
FIELD_ATTRIBUTES: Final[dict[str, np.dtype[Any]]] = {"sha256": np.dtype("S64")}
SHA256_CHARS: Final = 64
NO_SHA256: Final = "0" * SHA256_CHARS


def field_column(name: str) -> str:
    return f"{FIELDS_GROUP}/{name}"


def crc32_column(column: str) -> str:
    """Return the column of the crc32 rows of a column; the tokens have "crc32" alone."""
    return CRC32 if column in TOKEN_COLUMNS.values() else f"{column}.{CRC32}"


def extents_column(column: str) -> str:
    """Return the column with the ranges of the chunks of a compressed column."""
    return EXTENTS if column in TOKEN_COLUMNS.values() else f"{column}.{EXTENTS}"


def meta_block_bytes(expected_batches: int, num_columns: int = 1) -> int:
    """Return the size of HDF5's metadata block that keeps all chunks of a shard in one run of constant stride.

    The chunk index takes 8 to 14 bytes a chunk, measured over 1 to 600,000: 16 are enough. With 2 KiB, the default, the
    index blocks fall between the chunks (56 runs for 16,384 chunks).
    """
    return max(1 << 20, num_columns * (16 * expected_batches + (64 << 10)))


def batches_ahead(num_batches: int, meta: StoreMeta) -> int:
    """Return by how many batches a file is extended if their total is not known: it doubles, then grows evenly."""
    return max(1, min(max(16, num_batches), CRC32_CHUNK_ROWS, (1 << 40) // meta.padded_batch_bytes))


# --- HDF5 token stream, version 3 ------------------------------------------------------------------------------

STREAM_FORMAT: Final = "zb-tokens"
TOKENS: Final = "tokens"
DOCUMENTS_SHA256: Final = "documents_sha256"  # of the root: digest of the `.documents` table, empty without one
DOC_OFFSETS: Final = "doc_offsets"  # document d is tokens[doc_offsets[d]:doc_offsets[d + 1]]
DOC_OFFSETS_CHUNK_ROWS: Final = 8192  # 64 KiB: what one commit rewrites
DEFAULT_CHUNK_TOKENS: Final = 1 << 18
NO_BOUNDARY: Final = -1
#: Attributes of `tokens`, under the same rules as for `batches`; they are 8, so that it has no labels.
TOKENS_ATTRIBUTES: Final[dict[str, np.dtype[Any]]] = {
    "token_count": np.dtype("<u8"),  # the commit marker: token i exists iff i < token_count
    "document_count": np.dtype("<u8"),
    "max_token": np.dtype("<u8"),
    "sha256": np.dtype("S64"),  # 64 zeros until complete
    "complete": np.dtype("u1"),
    "boundary_token_id": np.dtype("<i8"),  # -1: none
    "chunk_tokens": np.dtype("<u8"),
    "doc_offsets_crc32": np.dtype("<u4"),  # of all rows of doc_offsets; 0 until complete
}

# --- shards.json, version 3 ------------------------------------------------------------------------------------

INDEX_NAME: Final = "shards.json"
INDEX_FORMAT: Final = "zb-shards"
INDEX_VERSION: Final = 3
BATCHES_LAYOUT: Final = "batches"
STREAM_LAYOUT: Final = "stream"
#: Layout -> the column that holds the tokens.
TOKEN_COLUMNS: Final = {BATCHES_LAYOUT: BATCHES, STREAM_LAYOUT: TOKENS}
NOT_KNOWN: Final = -1  # a number that nobody has stored
NOT_COUNTED: Final = -2  # the number of things that are stored, each of which would be read for it
NO_DOCUMENT: Final = 2**64 - 1  # the offset of a piece that is padding
#: Layout -> the keys of the index for the facts that all shards share.
INDEX_META_KEYS: Final = {
    BATCHES_LAYOUT: ("batch_size", "seq_len", "seed", "total_records", "document_count", "vocab_size"),
    STREAM_LAYOUT: ("chunk_tokens", "boundary_token_id", "document_count", "vocab_size"),
}
#: Key of `shards` -> attribute of an entry, and the JSON type of each element of its array.
INDEX_SHARD_KEYS: Final[dict[str, tuple[str, type[Any]]]] = {
    "path": ("path", str),
    "backend": ("backend", str),
    "bytes": ("num_bytes", int),
    "num_batches": ("num_batches", int),
    "token_count": ("token_count", int),
    "sha256": ("sha256", str),
    "crc32": ("crc32", int),
    "document_count": ("document_count", int),
    "split": ("split", str),
    "complete": ("complete", bool),
}
#: Keys of one element of `columns`: how many runs each shard has (-1: not known), and the runs of all shards.
INDEX_COLUMN_KEYS: Final = ("runs", "offset", "stride", "chunks")
#: Keys of one element of `fields`, besides dtype and shape -> the type of each element of its array.
INDEX_FIELD_KEYS: Final[dict[str, type[Any]]] = {"bytes": int, "sha256": str, "crc32": int}
SHARD_PREFIX: Final = "shard-"
#: Hexadecimal digits of the digest of a store that the names of its files have in a bucket: shard-00000.3fa1b2c3.h5.
UPLOAD_DIGITS: Final = 8
UPLOAD_DIGEST: Final = rf"(\.[0-9a-f]{{{UPLOAD_DIGITS}}})?"
DEFAULT_SPLIT: Final = "train"
SPLITS: Final = (DEFAULT_SPLIT, "val", "test")
LIVE_PREFIX: Final = "live:"  # of the fingerprint of a store that was written live
JOURNAL_PREFIX: Final = "journal-"  # what a conversion has done, in its `.partial/` only
CRC32_SUFFIX: Final = ".crc32"  # the sidecar of a `.batch` shard: raw little-endian uint32, one per batch
#: Section that not every shard has -> its keys -> JSON type of each element: the file of pieces of each shard
#: (bytes -1: it has none); its codec, and the bytes of its compressed tokens.
INDEX_OPTIONAL_KEYS: Final[dict[str, dict[str, type[Any]]]] = {
    "pieces": {"bytes": int, "sha256": str},
    "codecs": {"codec": str, "bytes": int},
}
#: Key of `documents`, the facts of each document table -> JSON type of each element.
INDEX_DOCUMENTS_KEYS: Final[dict[str, type[Any]]] = {
    "path": str,
    "bytes": int,
    "sha256": str,
    "split": str,
    "first_token": int,
    "token_count": int,
    "first_document": int,
    "document_count": int,
}

# --- digests of files of other programs, version 1 ------------------------------------------------------------------

DIGESTS_FORMAT: Final = "zb-digests"
DIGESTS_VERSION: Final = 1
#: Key of `files` -> JSON type of each element.
DIGESTS_FILE_KEYS: Final[dict[str, type[Any]]] = {
    "path": str,
    "bytes": int,
    "dtype": str,
    "token_count": int,
    "sha256": str,
    "documents_sha256": str,
    "crc32": str,
}
#: Hexadecimal digits of the crc32 of a chunk.
CRC32_DIGITS: Final = 8

# --- files of other trainers -----------------------------------------------------------------------------------

MEGATRON_INDEX_SUFFIX: Final = ".idx"  # beside the `.bin` of its ids

# --- HDF5 tables, version 2 ------------------------------------------------------------------------------------

TABLES_FORMAT: Final = "zb-tables"
TABLES_VERSION: Final = 2
TABLES_BLOCK_BYTES: Final = 1 << 16  # each of these of a dataset has a crc32
TABLES_ANCHOR_TOKENS: Final = 1 << 18  # an anchor is the first row at or after a multiple of these
PIECES: Final = "pieces"
DOCUMENTS: Final = "documents"
PIECES_SUFFIX: Final = ".pieces"  # of a shard or a lone file
DOCUMENTS_SUFFIX: Final = ".documents"  # of a lone file or a stream
DOCUMENTS_PREFIX: Final = "documents-"  # documents-00000.tables: in the folder of a batch store
DOCUMENTS_STORE_SUFFIX: Final = ".tables"
#: Kind of a tables file -> its datasets: name -> dtype. Each is contiguous, and not compressed.
TABLES: Final[dict[str, dict[str, str]]] = {
    PIECES: {
        "ends": "<u8",
        "columns": "<u4",
        "offsets": "<u8",
        "crc32": "<u4",
    },
    DOCUMENTS: {
        "offsets": "<u8",
        "source": "<u4",
        "row": "<u8",
        "sources_ends": "<u8",
        "sources": "|u1",
        "ids_ends": "<u8",
        "ids": "|u1",
        "metadata_ends": "<u8",
        "metadata": "|u1",
        "span_starts": "<u8",
        "span_values_ends": "<u8",
        "span_values": "|u1",
        "offset_anchors": "<u8",
        "span_anchors": "<u8",
        "crc32": "<u4",
    },
}
#: Ascending column -> its anchors: the first row at or above each multiple of `TABLES_ANCHOR_TOKENS`, then all rows.
TABLES_ANCHORS: Final = {"offsets": "offset_anchors", "span_starts": "span_anchors"}
#: The attributes of the root group of a tables file: of every kind, and of one kind.
TABLES_ATTRIBUTES: Final = ("format", "format_version", "creator", "kind", "sha256")
TABLES_KIND_ATTRIBUTES: Final = {
    PIECES: ("seq_len", "split", "tokens_sha256"),
    DOCUMENTS: ("split", "spans_codec", "tokens_sha256"),
}


# --- field sets, version 1 -----------------------------------------------------------------------------------------

#: The folder of the field sets of a store; the folder for a lone file or a folder of other programs has this suffix.
SETS_FOLDER: Final = "fields"
SETS_SUFFIX: Final = ".fields"
SET_FORMAT: Final = "zb-field-set"
SET_VERSION: Final = 1
SET_FACTS: Final = "set.json"  # its values, and the tokens that they belong to
SET_GROWN: Final = "grown-"  # grown-00001.json: files of tokens that came later
SET_INDEX: Final = "index.json"  # of a finished set: its parts, their digests, and the places of their values
VALUES_FORMAT: Final = "zb-values"
VALUES_VERSION: Final = 1
VALUES_PREFIX: Final = "part-"
VALUES_SUFFIX: Final = ".values"  # of a part: no pattern for tokens finds it
CLAIM_SUFFIX: Final = ".claim"
#: The group of the values in a part, one dataset for each field; that of their crc32 rows; and the marks of records.
VALUES_GROUP: Final = "values"
MARKS: Final = "marks"
#: The attributes of the root group of a part.
VALUES_ATTRIBUTES: Final = ("format", "format_version", "creator", "set", "split", "about", "first_record", "note")
#: Values of a field set are about the token after the one at their place, or about that token itself.
ABOUT: Final = ("next", "token")
#: Key of `parts` in `index.json` -> JSON type of each element.
SET_PARTS_KEYS: Final[dict[str, type[Any]]] = {
    "path": str,
    "bytes": int,
    "first": int,
    "records": int,
    "tokens": int,
    "sha256": str,
}
#: Key of one element of `fields` in `index.json` -> JSON type: the place of the values, that of the crc32 rows, and the
#: crc32 of these rows.
SET_FIELD_KEYS: Final[dict[str, type[Any]]] = {"offset": int, "crc32_offset": int, "crc32": int}

# --- sidecars of a file ---------------------------------------------------------------------------------------


def crc32_path(path: Path) -> Path:
    """Return the path of the crc32 sidecar of a `.batch` file."""
    return path.with_name(path.name + CRC32_SUFFIX)


def pieces_path(path: Path) -> Path:
    """Return the path of the table of the pieces of a file of batches."""
    return path.with_name(path.name + PIECES_SUFFIX)


def documents_path(path: Path) -> Path:
    """Return the path of the documents of a lone file or a stream."""
    return path.with_name(path.name + DOCUMENTS_SUFFIX)


def sidecars_of(path: Path) -> tuple[Path, ...]:
    """Return the paths of all sidecars that a file may have."""
    return pieces_path(path), documents_path(path), crc32_path(path)


# --- the description of a store --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """Shape and origin of a store: the facts that all its batches have in common.

    Attributes
    ----------
    batch_size, seq_len
        Records per batch and tokens per record.
    dtype
        Stored dtype of a token: little-endian uint32 or uint16, or uint8.
    seed
        Seed of the record shuffle at write time (0 when not shuffled).
    total_records
        Source records before batching; 0 when it was not known at write time.
    document_count, vocab_size
        0 when unknown.
    tokenizer
        JSON text that describes the tokenizer; empty when unknown.
    boundary_token_id
        The token between the documents of a stream, -1 for none.
    layout
        "batches", or "stream". A stream counts each of its chunks as a batch of one record; its last chunk may hold
        fewer tokens.
    fields
        The fields of the tokens, in the order of their names.
    codec
        Codec of the chunks, with its level ("zstd:3"), or "none".
    field
        None for tokens. The field whose values these batches are: then `dtype` is its dtype, and a record has
        `seq_len` values: all values of the first token, then of the second one, and so on.
    unfit
        In files of another program: the fields that are named as targets are and have other values, each with these in
        words.

    Raises
    ------
    ArgumentError
        If a value is out of range.
    """

    batch_size: int
    seq_len: int
    dtype: np.dtype[Any]
    seed: int = 0
    total_records: int = 0
    document_count: int = 0
    vocab_size: int = 0
    tokenizer: str = ""
    boundary_token_id: int = NO_BOUNDARY
    layout: str = BATCHES_LAYOUT
    fields: tuple[Field, ...] = ()
    codec: str = NO_CODEC
    field: Field | None = None
    unfit: tuple[tuple[str, str], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values up to the last that is not the usual one, and the name of the dtype, not its layout."""
        values = [*_VALUES_OF_META(self)]
        while values[-1] == _USUAL_OF_META[len(values) - 1]:
            values.pop()
        values[_DTYPE_AT] = self.dtype if self.dtype.names is not None else self.dtype.str
        return _meta_of, tuple(values)

    def __repr__(self) -> str:
        shape = f"batch_size={self.batch_size}, seq_len={self.seq_len}, dtype={self.dtype.name}"
        fields = ", ".join(field.name for field in self.fields) or "none"
        return f"{type(self).__name__}({shape}, layout={self.layout!r}, codec={self.codec!r}, fields: {fields})"

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len"):
            self._require_range(name, 1, U32_MAX, f"{U32_MAX:,}")
        for name in ("seed", "total_records", "document_count", "vocab_size"):
            self._require_range(name, 0, 2**64 - 1, "2**64 - 1")
        if self.field is None and self.dtype not in DTYPE_BY_NAME.values():
            raise ArgumentError(f"dtype must be one of {', '.join(DTYPE_BY_NAME)}, found {self.dtype}")
        self._require_chunks()

    def _require_chunks(self) -> None:
        """Raise `ArgumentError` if a batch of the tokens, or of a field of theirs, is not a chunk of HDF5."""
        if self.field is not None:
            return
        widest = max((field.size * field.dtype.itemsize for field in self.fields), default=0)
        num_bytes = max(self.batch_bytes, self.batch_tokens * widest)
        if num_bytes >= 2**32:
            raise ArgumentError(
                f"a batch of {self.batch_size:,} x {self.seq_len:,} tokens has {num_bytes:,} bytes; "
                "HDF5 chunks end below 4 GiB: use a smaller batch_size"
            )

    def _require_range(self, name: str, least: int, most: int, shown: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, np.integer)) or not least <= value <= most:
            raise ArgumentError(f"{name} must be between {least} and {shown}, found {value!r}")

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of one batch."""
        return self.batch_size, self.seq_len

    @property
    def batch_tokens(self) -> int:
        """Tokens in one batch."""
        return self.batch_size * self.seq_len

    @property
    def noun(self) -> str:
        """The name of a batch in messages: a stream calls it a chunk."""
        return "batch" if self.layout == BATCHES_LAYOUT else "chunk"

    @property
    def column(self) -> str:
        """Name of the column that holds these batches."""
        return TOKEN_COLUMNS[self.layout] if self.field is None else field_column(self.field.name)

    def of_field(self, name: str) -> StoreMeta:
        """Describe the batches of a field's values.

        Raises
        ------
        ArgumentError
            If there is no such field.
        """
        for field in self.fields:
            if field.name == name:
                return replace(
                    self,
                    seq_len=self.seq_len * field.size,
                    dtype=field.dtype,
                    vocab_size=0,
                    tokenizer="",
                    fields=(),
                    field=field,
                )
        stored = ", ".join(field.name for field in self.fields) or "none is"
        raise ArgumentError(f"expected a field that is stored ({stored}), found {name!r}")

    @property
    def chunk_tokens(self) -> int:
        """Tokens in one chunk of a stream."""
        return self.batch_tokens

    @property
    def batch_bytes(self) -> int:
        """Bytes of one batch's tokens, without padding."""
        return self.batch_tokens * self.dtype.itemsize

    @property
    def padded_batch_bytes(self) -> int:
        """Bytes of one slot of a `.batch` file: `batch_bytes` rounded up to whole pages."""
        return -(-self.batch_bytes // PAGE_BYTES) * PAGE_BYTES


#: Returns the values of a `StoreMeta`; their defaults; the place of the dtype among them.
_VALUES_OF_META: Final = attrgetter(*(each.name for each in fields(StoreMeta)))
_USUAL_OF_META: Final = tuple(each.default for each in fields(StoreMeta))
_DTYPE_AT: Final = 2


def _meta_of(batch_size: int, seq_len: int, dtype: npt.DTypeLike, *others: Any) -> StoreMeta:
    """Return facts that were pickled."""
    return StoreMeta(batch_size, seq_len, np.dtype(dtype), *others)


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the stored dtype called `name`: "uint32", "uint16" or "uint8"."""
    try:
        return DTYPE_BY_NAME[np.dtype(name).name]
    except (KeyError, TypeError) as error:
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPE_BY_NAME)}, found {name!r}") from error


# --- identity --------------------------------------------------------------------------------------------------


def is_sha256(text: str) -> bool:
    """Return whether `text` is 64 lower-case hexadecimal digits."""
    return len(text) == SHA256_CHARS and is_hexadecimal(text)


def is_hexadecimal(text: str) -> bool:
    """Return whether `text` has lower-case hexadecimal digits only."""
    return not text.encode("utf-8", "replace").translate(None, b"0123456789abcdef")


def is_file_name(text: str) -> bool:
    """Return whether `text` can be the path of a file: no NUL, and nothing that UTF-8 cannot hold."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def combine_sha256(shard_digests: Iterable[str]) -> str:
    """Digest of a store: sha256 over the hexadecimal shard digests, in order."""
    return hashlib.sha256("".join(shard_digests).encode("ascii")).hexdigest()


def content_fingerprint(shard_digests: Iterable[str], meta: StoreMeta) -> str:
    """Identity of a store by content: the same tokens, shards and shape give the same text in every backend."""
    return f"sha256:{combine_sha256(shard_digests)}:{shape_in_fingerprint(meta)}"


def shape_in_fingerprint(meta: StoreMeta) -> str:
    """Return the end of the fingerprint of stored batches."""
    return f"{meta.batch_size}x{meta.seq_len}:{meta.dtype.name}"


# --- token values -----------------------------------------------------------------------------------------------------


def token_limit(dtype: np.dtype[Any], vocab_size: int) -> int:
    """Largest token id that may be stored."""
    limit = int(np.iinfo(dtype).max)
    return min(limit, vocab_size - 1) if vocab_size else limit


def dtype_of_ids(num_ids: int) -> np.dtype[Any]:
    """Return the smallest dtype of tokens that holds the ids below `num_ids`; uint32 if none does."""
    by_size = sorted(DTYPE_BY_NAME.values(), key=lambda dtype: dtype.itemsize)
    return next((dtype for dtype in by_size if num_ids - 1 <= np.iinfo(dtype).max), by_size[-1])


def fitting_dtype(dtypes: Iterable[np.dtype[Any]], vocab_size: int, num_added: int = 0) -> np.dtype[Any]:
    """Return the smallest dtype of tokens that is proved to hold all ids; uint32 if nothing is.

    Parameters
    ----------
    dtypes
        Those of the files: of unsigned integers they are a proof.
    vocab_size
        The size of the vocabulary, at which ids are refused; 0: not known.
    num_added
        The ids that come beside those of the files, such as padding, are below it.
    """
    proofs = [vocab_size] if vocab_size else []
    known = list(dtypes)
    if all(dtype.kind == "u" for dtype in known):
        proofs.append(max((int(np.iinfo(dtype).max) for dtype in known), default=U32_MAX) + 1)
    return dtype_of_ids(max(min(proofs, default=U32_MAX), num_added))


def find_bad_token(tokens: TokenArray, limit: int) -> int | None:
    """Return the flat index of the first token below 0 or above `limit`, or None."""
    bounds = np.iinfo(tokens.dtype)  # types that cannot hold a bad value are not scanned
    too_low = bounds.min < 0 and int(tokens.min(initial=0)) < 0
    too_high = bounds.max > limit and int(tokens.max(initial=0)) > limit
    return int(((tokens < 0) | (tokens > limit)).reshape(-1).argmax()) if too_low or too_high else None


def require_integers(tokens: TokenArray, what: object) -> None:
    """Raise `ConvertError` unless `tokens` has an integer dtype."""
    if tokens.dtype.kind not in "iu":
        raise ConvertError(f"{what}: expected token ids of an integer dtype, found {tokens.dtype}")


def signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the signed dtype of the same size."""
    return np.dtype(f"<i{dtype.itemsize}")


def as_stored(tokens: TokenArray, meta: StoreMeta, what: object) -> TokenArray:
    """Return `tokens` C-contiguous, of the stored dtype; `ConvertError` names the first id out of its range."""
    require_integers(tokens, what)
    bad = find_bad_token(tokens, token_limit(meta.dtype, meta.vocab_size))
    if bad is not None:
        raise ConvertError(bad_token_message(what, f"index {bad:,}", tokens.reshape(-1)[bad], meta))
    return np.ascontiguousarray(tokens, dtype=meta.dtype)


def bad_token_message(what: object, where: str, value: object, meta: StoreMeta) -> str:
    """Return the message for a token that cannot be stored."""
    limit = token_limit(meta.dtype, meta.vocab_size)
    reason = f"vocab_size {meta.vocab_size:,}" if limit == meta.vocab_size - 1 else f"dtype {meta.dtype.name}"
    return f"{what}: token id {value} at {where} is outside 0..{limit:,} ({reason})"
