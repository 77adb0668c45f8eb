"""MosaicML streaming's data sets: `index.json` and `shard.*.mds`, whole or compressed; each sample is a document.

A shard, little-endian: number of samples N u4; where each sample begins and the last one ends, u4 [N + 1]; JSON of
its columns; the samples. A sample has the bytes of each column without a fixed size, u4, and then the values of all.
Source: `streaming.base.format.mds`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import row_of_source
from zb_hdf5.errors import ChecksumError, ConvertError, FormatError, IncompleteError, ZbError
from zb_hdf5.files.codecs import read_packed
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import Found, RowsFormat
from zb_hdf5.formats.id_source import Columns, ColumnSelection, IdFile, IdRows, IdSource, RowBlock
from zb_hdf5.read_as import ReadAs
from zb_hdf5.text.lacking_text import IDS_COLUMNS
from zb_hdf5.trainers.index_folder import (
    FOLDER_INDEX,
    MAX_FILE_BYTES,
    NUMBER_BYTES,
    ZSTD,
    Entry,
    folders_of,
    indexes_of,
    read_index,
    require_codec_of,
    require_files_once,
    require_present_file,
)

#: The name of the format.
MDS: Final = "mds"
MDS_VERSION: Final = 2
#: Codes of dtypes in an array that has its own.
MDS_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    8: np.dtype("u1"),
    9: np.dtype("i1"),
    16: np.dtype("<u2"),
    17: np.dtype("<i2"),
    18: np.dtype("<f2"),
    32: np.dtype("<u4"),
    33: np.dtype("<i4"),
    34: np.dtype("<f4"),
    64: np.dtype("<u8"),
    65: np.dtype("<i8"),
    66: np.dtype("<f8"),
}
#: Names of dtypes in the encoding of an array.
_DTYPES: Final = {dtype.name: dtype for dtype in MDS_DTYPES.values()}
ARRAY: Final = "ndarray"
BYTES: Final = "bytes"


def _number(dtype: np.dtype[Any], data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0].item()


#: Encodings of one value of a sample.
_VALUES: Final[dict[str, Callable[[bytes], Any]]] = {
    "str": lambda data: data.decode("utf-8"),
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": lambda data: int(data.decode("ascii")),
    "str_float": lambda data: float(data.decode("ascii")),
    "str_decimal": lambda data: data.decode("ascii"),
    "json": json.loads,
    **{name: partial(_number, dtype) for name, dtype in _DTYPES.items()},
}


@dataclass(frozen=True)
class Encoding:
    """The encoding of a column: its name, such as "ndarray", and for an array the dtype and the shape that all have.

    Parameters
    ----------
    name
        In front of the first colon.
    dtype
        The dtype of all arrays; None: each has its own.
    shape
        The shape of all arrays; None: each has its own.
    """

    name: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, text: str, where: str) -> Encoding:
        """Return the encoding that an index names; `FormatError` if it is none."""
        name, *parts = text.split(":")
        if name != ARRAY:
            return cls(text)
        if len(parts) > 2 or not set(parts[:1]) <= _DTYPES.keys():
            raise FormatError(f"{where}: expected an array of one of {', '.join(_DTYPES)}, found {text!r}")
        try:
            shape = tuple(map(int, parts[1].split(","))) if len(parts) == 2 else None
        except ValueError as error:
            raise FormatError(f"{where}: expected the shape of an array, found {text!r}") from error
        return cls(ARRAY, _DTYPES[parts[0]] if parts else None, shape)

    def kind(self, data: npt.NDArray[np.uint8], where: str) -> np.dtype[Any] | str:
        """Return the dtype of the array of one sample, words if it has more axes; `FormatError` for other bytes."""
        dtype, shape, _ = self._parts(data, where)
        return dtype if len(shape) == 1 else _of_axes(len(shape))

    def array(self, data: npt.NDArray[np.uint8], where: str) -> npt.NDArray[Any]:
        """Return the array of one sample; `FormatError` if the bytes are none, `ConvertError` if it has more axes."""
        dtype, shape, data = self._parts(data, where)
        if len(shape) != 1:
            raise ConvertError(f"{where}: expected an array of one axis, found {len(shape)} axes")
        if len(data) != shape[0] * dtype.itemsize:
            raise FormatError(
                f"{where}: expected {shape[0]:,} values of {dtype.itemsize} bytes, found {len(data):,} bytes"
            )
        return data.view(dtype)

    def _parts(
        self, data: npt.NDArray[np.uint8], where: str
    ) -> tuple[np.dtype[Any], tuple[int, ...], npt.NDArray[np.uint8]]:
        """Return the dtype and the shape of the array of one sample, and the bytes of its values."""
        dtype = self.dtype
        if dtype is None:
            dtype = MDS_DTYPES.get(int(data[0])) if len(data) else None
            if dtype is None:
                raise FormatError(f"{where}: expected an array with its dtype, found {data[:8].tobytes()!r}")
            data = data[1:]
        shape = self.shape
        if shape is None:
            shape, data = _shape_of(data, where)
        return dtype, shape, data


def _of_axes(count: int) -> str:
    return f"arrays of {count} axes"


def _shape_of(data: npt.NDArray[np.uint8], where: str) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """Return the shape in front of an array, and the bytes after it."""
    code = int(data[0]) if len(data) else 0
    num_axes = code >> 2
    itemsize = 1 << (code & 3)  # of a number of the shape
    end = 1 + num_axes * itemsize
    if not num_axes or len(data) < end:
        raise FormatError(f"{where}: expected an array with its shape, found {data[:8].tobytes()!r}")
    return tuple(data[1:end].view(f"<u{itemsize}").tolist()), data[end:]


class _File(NamedTuple):
    """A file of a shard, as the index has it."""

    path: Path
    num_bytes: int
    hashes: Mapping[str, Any]

    @classmethod
    def of(cls, entry: Entry) -> _File:
        """Return the file of a part of the index; `FormatError` if it has none."""
        return cls(entry.file("basename"), entry.number("bytes"), entry.part("hashes").values)


class Shard(IdFile):
    """One shard.

    Parameters
    ----------
    entry
        Its entry in the index.
    wanted
        The columns that a conversion asks for.
    source_dtype
        The dtype of ids in a column of bytes; None: it was not named.
    before
        The shard before it, whose columns it has if their encodings are the same; None: this is the first one.
    """

    def __init__(
        self,
        entry: Entry,
        wanted: ColumnSelection,
        source_dtype: np.dtype[Any] | None = None,
        before: Shard | None = None,
    ) -> None:
        self._where = entry.where
        if entry.values.get("format") != MDS or entry.values.get("version") != MDS_VERSION:
            found = f"{entry.values.get('format')}, version {entry.values.get('version')}"
            raise FormatError(f"{entry.where}: expected {MDS}, version {MDS_VERSION}, found {found}")
        self._num_samples = entry.number("samples")
        self._raw = _File.of(entry.part("raw_data"))
        self._stored = self._raw
        if entry.values.get("zip_data") and not self._raw.path.exists():
            require_codec_of(entry.where, str(entry.values.get("compression")))
            self._stored = _File.of(entry.part("zip_data"))
        super().__init__(self._stored.path, require_present_file(self._stored.path))
        self.group_bytes = [self._raw.num_bytes]
        size = self.identity.num_bytes
        if size != self._stored.num_bytes:
            raise IncompleteError(
                f"{self.path}: expected {self._stored.num_bytes:,} bytes, as {FOLDER_INDEX} has it, found {size:,}"
            )
        if not NUMBER_BYTES * (self._num_samples + 2) <= self._raw.num_bytes <= MAX_FILE_BYTES:
            raise FormatError(
                f"{entry.where}: expected the bytes of {self._num_samples:,} samples, found {self._raw.num_bytes:,}"
            )
        self._encodings = _encodings_of(entry)
        if before is not None and before.encodings == self._encodings:
            self.columns = before.columns
        else:
            self.columns = self._find_columns(wanted, source_dtype)

    @property
    def encodings(self) -> Mapping[str, tuple[Encoding, int]]:
        """For each column its encoding, and the fixed bytes of its values; 0 for values of any size."""
        return self._encodings

    def _find_columns(self, wanted: ColumnSelection, source_dtype: np.dtype[Any] | None) -> Columns:
        kinds: dict[str, np.dtype[Any] | str] = {}
        for name, (encoding, _) in self._encodings.items():
            kinds[name] = encoding.name if encoding.dtype is None else encoding.dtype
            if encoding == Encoding(ARRAY) and self._num_samples:
                first = next(self._samples(self._content(), [name]))
                kinds[name] = encoding.kind(first[0], f"{row_of_source(self.path, 1)}: column {name!r}")
            elif encoding.shape is not None and len(encoding.shape) != 1:
                kinds[name] = _of_axes(len(encoding.shape))
        ids = wanted.ids_column or next((name for name in IDS_COLUMNS if name in kinds), "")
        if kinds.get(ids) == BYTES:
            if source_dtype is None:
                raise ConvertError(
                    f"{self.path}: column {ids!r}: expected arrays, found bytes, whose dtype is not stored: name it in "
                    "source_dtype",
                    options=["source_dtype"],
                )
            kinds[ids] = source_dtype
        elif source_dtype is not None and ids in kinds:
            raise ConvertError(
                f"{self.path}: column {ids!r}: source_dtype is for bytes, found {kinds[ids]}; leave it out",
                options=["source_dtype"],
            )
        for name in (wanted.id_column, *wanted.metadata_columns):
            if name in kinds and self._encodings[name][0].name not in _VALUES:
                raise ConvertError(
                    f"{self.path}: column {name!r}: expected one of {', '.join(_VALUES)}, found {kinds[name]}"
                )
        return wanted.columns(self.path, kinds)

    def _rows(self, number: int) -> Iterator[IdRows]:
        columns = self.columns
        block = RowBlock(self.path, columns)
        read = 0
        for found in self._samples(self._content(), columns.names):
            read += sum(len(value) for value in found)
            values = dict(zip(columns.names, found, strict=True))
            lists = [self._array(name, values[name], block.where) for name in columns.lists]
            more = [self._value(name, values[name], block.where) for name in columns.more]
            lengths = self._array(columns.lengths, values[columns.lengths], block.where) if columns.lengths else None
            block.add(lists, more, lengths)
            if block.is_full:
                yield from block.take(read)
        yield from block.take(read)

    def _content(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the shard, compared with the hashes of the index."""
        path, num_bytes, _ = self._stored
        stored: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r", shape=num_bytes).view(np.ndarray)
        _require_hash(self._stored, stored)
        if self._stored is self._raw:
            return stored
        found = read_packed(path, ZSTD, self._raw.num_bytes)
        _require_hash(self._raw, found)
        return found

    def _samples(self, content: npt.NDArray[np.uint8], names: Sequence[str]) -> Iterator[list[npt.NDArray[np.uint8]]]:
        """Yield the bytes of some columns of each sample."""
        count = int.from_bytes(content[:NUMBER_BYTES].tobytes(), "little")
        offsets = content[NUMBER_BYTES : NUMBER_BYTES * (self._num_samples + 2)].view("<u4").astype(np.int64)
        first = NUMBER_BYTES * (self._num_samples + 2)
        if (
            count != self._num_samples
            or offsets[0] < first
            or offsets[-1] != len(content)
            or (np.diff(offsets) < 0).any()
        ):
            raise FormatError(
                f"{self.path}: expected {self._num_samples:,} samples, as {FOLDER_INDEX} has it, to byte "
                f"{len(content):,}, found {count:,} to byte {offsets[-1]:,}"
            )
        fixed = np.array([size for _, size in self._encodings.values()], np.int64)
        head = NUMBER_BYTES * int(np.count_nonzero(fixed == 0))
        places = [list(self._encodings).index(name) for name in names]
        for row, (start, stop) in enumerate(pairwise(offsets.tolist()), 1):
            sizes = fixed.copy()
            sample = content[start:stop]
            if len(sample) >= head:
                sizes[fixed == 0] = sample[:head].view("<u4")
            ends = head + np.cumsum(sizes)
            if ends[-1] != len(sample):
                raise FormatError(
                    f"{row_of_source(self.path, row)}: expected columns of {len(sample):,} bytes, found {ends[-1]:,}"
                )
            yield [sample[ends[place] - sizes[place] : ends[place]] for place in places]

    def _array(self, name: str, data: npt.NDArray[np.uint8], where: str) -> npt.NDArray[Any]:
        encoding = self._encodings[name][0]
        where = f"{where}: column {name!r}"
        if encoding.name != BYTES:
            return encoding.array(data, where)
        dtype = self.columns.dtype
        if len(data) % dtype.itemsize:
            raise FormatError(f"{where}: expected ids of {dtype.itemsize} bytes, found {len(data):,} bytes")
        return data.view(dtype)

    def _value(self, name: str, data: npt.NDArray[np.uint8], where: str) -> Any:
        encoding = self._encodings[name][0].name
        try:
            return _VALUES[encoding](data.tobytes())
        except (ValueError, IndexError, RecursionError) as error:
            raise FormatError(
                f"{where}: column {name!r}: expected {encoding}, found {data[:20].tobytes()!r}"
            ) from error


def _require_hash(file: _File, content: npt.NDArray[np.uint8]) -> None:
    """Raise `ChecksumError` if a file has not the hash of the index; hashes that Python lacks are not compared."""
    for name, expected in file.hashes.items():
        if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
            found = hashlib.new(name, content, usedforsecurity=False).hexdigest()
            if found != expected:
                raise ChecksumError(
                    f"{file.path}: expected {name} {expected}, as {FOLDER_INDEX} has it, found {found}: it is damaged"
                )
            return


def _encodings_of(entry: Entry) -> dict[str, tuple[Encoding, int]]:
    keys = ("column_names", "column_encodings", "column_sizes")
    lists = [entry.values.get(key) for key in keys]
    if not all(isinstance(each, list) for each in lists) or len({len(each or ()) for each in lists}) != 1:
        raise FormatError(f"{entry.where}: expected lists of {', '.join(keys)}, of one length")
    names, encodings, sizes = (each or [] for each in lists)
    if not all(size is None or (isinstance(size, int) and 0 <= size <= MAX_FILE_BYTES) for size in sizes):
        raise FormatError(f"{entry.where}: expected the bytes of columns, found {sizes!r:.80}")
    return {
        str(name): (Encoding.of(str(encoding), entry.where), size or 0)
        for name, encoding, size in zip(names, encodings, sizes, strict=True)
    }


def open_mds(
    paths: Sequence[Path],
    look: Look | None = None,
    *,
    source_dtype: str | None = None,
    ids_column: str = "",
    field_columns: Sequence[str] | None = None,
    id_column: str = "",
    metadata_columns: Sequence[str] = (),
    rows: str = "documents",
    dtype: str = "auto",
    vocab_size: int = 0,
    max_document_tokens: int | None = None,
) -> IdSource:
    """Open folders of MDS as documents.

    Parameters
    ----------
    paths
        The folders, each with its index, or with a folder for each split.
    look
        The look by which the first of them was found; None: it is looked at.
    source_dtype
        The dtype of ids in a column of bytes; None: such a column is refused.
    ids_column, field_columns, id_column, metadata_columns
        As for `ColumnSelection`.
    rows, dtype, vocab_size, max_document_tokens
        As for `IdSource`.

    Raises
    ------
    ConvertError
        If the shards lack a column, or two have not the same fields.
    FormatError
        If the index or a shard is damaged.
    """
    wanted = ColumnSelection(ids_column, field_columns, id_column, metadata_columns)
    ids_dtype = None if source_dtype is None else ReadAs(source_dtype=source_dtype).ids_dtype
    shards: list[Shard] = []
    indexes: list[Path] = []
    with Look(paths[0]) if look is None else nullcontext(look) as look:
        for index in indexes_of(paths, look):
            entries = index.parts("shards", "shard")
            require_files_once(entries, "raw_data", "basename")
            for entry in entries:
                shards.append(Shard(entry, wanted, ids_dtype, shards[-1] if shards else None))
            indexes.append(index.folder / FOLDER_INDEX)
    return IdSource(
        shards,
        MDS,
        wanted,
        rows=rows,
        dtype=dtype,
        vocab_size=vocab_size,
        max_document_tokens=max_document_tokens,
        more_paths=indexes,
    )


class MdsFolders(RowsFormat):
    """Folders of MDS."""

    def fits(self, look: Look) -> bool:
        try:
            return read_index(folders_of(look)[0], look).parts("shards", "shard")[0].values.get("format") == MDS
        except (OSError, ZbError):
            return False

    def rows(self, found: Sequence[Found], **options: Any) -> IdSource:
        return open_mds([each.path for each in found], found[0].look, **options)
