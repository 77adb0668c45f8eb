"""The file formats: one row of facts for each, and the code that serves it.

A new format is one file with a reader and a writer, and one row in `FORMATS`. All that differs between formats is asked
of the row, or of the reader and the writer that it names; no other code knows a format by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from zb_hdf5.errors import ArgumentError, ConvertError, FormatError
from zb_hdf5.files.identity import open_file
from zb_hdf5.files.paths import any_path

if TYPE_CHECKING:  # numpy too is imported when it is needed: the command line makes its commands of these rows
    from zb_hdf5.columns.file_writer import FileWriter
    from zb_hdf5.columns.reader import BatchReader, BrokenFile
    from zb_hdf5.columns.writer import BatchWriter
    from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter
    from zb_hdf5.spec import StoreMeta

#: The magic bytes of every format stand in this part of a file.
HEAD_BYTES: Final = 4096


@dataclass(frozen=True)
class FileFormat:
    """A row of the registry. What is code is named "module:name", and imported when it is first needed.

    Attributes
    ----------
    suffix
        Of the files it writes.
    writer
        The `FileWriter`.
    reader
        The `BatchReader`; "" if its files hold records that are no batches yet.
    magic, magic_offsets
        The name of the bytes that tell its files, and where they may stand.
    noun
        A file of it, in messages.
    as_source, as_target
        Its name in the help of the command line, and an example of a path; None if no command begins or ends with it.
    other_suffixes
        Suffixes of such files of another origin: no name for a folder.
    indexed
        Whether a folder of its files is a store with a `shards.json`.
    has_sidecar
        Whether a store keeps the crc32 rows of its files in files beside them.
    tokens_only
        Whether its files hold no fields and no documents.
    holds_codecs
        Whether its files may be compressed.
    guards_metadata
        Whether damage to the counts in a file is found by the file itself, so that a store need not compare them.
    has_datasets
        Whether a file may hold data sets of another origin, which are opened by name.
    can_grow
        Whether its files may be read while they grow.
    uint16_note
        What is wrong with uint16 tokens for other readers of the format; "" if nothing is.
    size
        `(meta, num_batches) -> int`: about how many bytes a file has.
    broken
        `(path, shape) -> BrokenFile`, for repair; "": what its reader cannot open is lost.
    checks
        Each is `(reader) -> names`: it checks what no digest covers, and names the checks that it made.
    problems
        `(path) -> (problem, remedy)` of this machine with a file.
    stream
        `(path) -> bool`: whether a file holds a token stream and no batches; "": none does.
    stream_reader, stream_writer
        The `BatchReader` of the chunks of such a file, and what writes one of documents.
    undigested
        `(path) -> (tokens, what is missing)` of a file that holds no digests, and is no batches.
    """

    name: str
    suffix: str
    writer: str
    reader: str = ""
    magic: str = ""
    magic_offsets: tuple[int, ...] = (0,)
    noun: str = ""
    as_source: tuple[str, str] | None = None
    as_target: tuple[str, str] | None = None
    other_suffixes: tuple[str, ...] = ()
    indexed: bool = True
    has_sidecar: bool = False
    tokens_only: bool = False
    holds_codecs: bool = False
    guards_metadata: bool = False
    has_datasets: bool = False
    can_grow: bool = False
    uint16_note: str = ""
    size: str = ""
    broken: str = ""
    checks: tuple[str, ...] = ()
    problems: str = ""
    stream: str = ""
    stream_reader: str = ""
    stream_writer: str = ""
    undigested: str = ""

    def reader_class(self) -> Callable[..., BatchReader]:
        return cast("Callable[..., BatchReader]", _load(self.reader))

    def writer_class(self) -> type[FileWriter]:
        return cast("type[FileWriter]", _load(self.writer))

    def open(self, path: Path, **options: Any) -> BatchReader:
        """Open a file of this format; `options` are those of its reader."""
        return self.reader_class()(path, **options)

    def begin(self, path: str | os.PathLike[str], meta: StoreMeta, **options: Any) -> BatchWriter:
        """Begin a file of this format; see `FileWriter`."""
        return self.writer_class()(path, meta, **options)

    def stream_writer_class(self) -> Callable[..., HDF5ShardWriter] | None:
        """Return what writes a token stream, or None if no file of this format holds one."""
        return cast("Callable[..., HDF5ShardWriter]", _load(self.stream_writer)) if self.stream_writer else None

    @property
    def default_dtype(self) -> str:
        """The dtype of new tokens: uint32 where other readers know no other one, else "auto", what fits."""
        return "uint32" if self.uint16_note else "auto"

    def has_magic(self, head: bytes) -> bool:
        """Return whether the first `HEAD_BYTES` of a file are those of this format."""
        magic = _load(self.magic) if self.magic else None
        return magic is not None and any(head.startswith(magic, offset) for offset in self.magic_offsets)

    def stored_bytes(self, meta: StoreMeta, num_batches: int) -> int:
        """Return about how many bytes a file of these batches has."""
        return int(_load(self.size)(meta, num_batches)) if self.size else num_batches * meta.padded_batch_bytes

    def total_bytes(self, meta: StoreMeta, num_batches: int) -> int:
        """Return about how many bytes these batches and their fields take."""
        fields = (meta.of_field(field.name).padded_batch_bytes for field in meta.fields)
        return self.stored_bytes(meta, num_batches) + num_batches * sum(fields)

    def require(self, meta: StoreMeta, path: Path) -> None:
        """Raise `ArgumentError` if a file of this format cannot hold such batches."""
        if meta.codec != "none" and not self.holds_codecs:
            raise ArgumentError(f"{path}: {self.name} files are never compressed: leave out the codec {meta.codec}")

    def open_broken(self, path: Path, shape: StoreMeta | None) -> BrokenFile:
        """Open a damaged or unfinished file.

        Parameters
        ----------
        shape
            Shape and dtype of the batches, for a file whose header was never written.
        """
        if self.broken:
            return cast("BrokenFile", _load(self.broken)(path, shape))
        from zb_hdf5.columns.reader import open_unfinished

        return open_unfinished(open_chunks(path))

    def extra_checks(self, reader: BatchReader) -> list[str]:
        """Check what no digest covers, and return the names of the checks. Raises `ChecksumError`."""
        return [name for check in self.checks for name in _load(check)(reader)]

    def look_at(self, path: Path) -> tuple[int, str]:
        """Return how many tokens a file of an `undigested` format has, and what is missing to verify it."""
        tokens, missing = _load(self.undigested)(path)
        return int(tokens), str(missing)

    def problems_of(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yield what stops this machine from reading a file, and what helps."""
        if self.problems:
            yield from _load(self.problems)(path)

    def holds_stream(self, path: Path) -> bool:
        """Return whether a file holds a token stream and no batches."""
        return bool(self.stream) and bool(_load(self.stream)(path))


_UINT16_BATCH: Final = (
    "uint16 .batch files are an extension: other ZeroBatch v2 readers take the ids for uint32 and return wrong ones"
)
_ROWS: Final = (
    FileFormat(
        "batch",
        ".batch",
        writer="zb_hdf5.formats.native:BatchFileWriter",
        reader="zb_hdf5.formats.native:BatchFileReader",
        magic="zb_hdf5.spec:BATCH_MAGIC",
        noun="a .batch file",
        as_source=("a .batch store", "train-batch"),
        as_target=("a .batch store", "train-batch"),
        has_sidecar=True,
        tokens_only=True,
        uint16_note=_UINT16_BATCH,
        size="zb_hdf5.formats.native:stored_bytes",
        broken="zb_hdf5.formats.native:open_broken",
    ),
    FileFormat(
        "hdf5",
        ".h5",
        writer="zb_hdf5.formats.hdf5.writer:HDF5BatchWriter",
        reader="zb_hdf5.formats.hdf5.reader:HDF5BatchReader",
        magic="zb_hdf5.spec:HDF5_MAGIC",
        magic_offsets=(0, 512, 1024, 2048),  # behind a user block HDF5 doubles the offset; nobody uses more
        noun="an HDF5 file",
        as_source=("an HDF5 store", "train-h5"),
        as_target=("an HDF5 store", "train-h5"),
        other_suffixes=(".hdf5", ".hdf", ".he5"),
        holds_codecs=True,
        guards_metadata=True,
        has_datasets=True,
        can_grow=True,
        size="zb_hdf5.formats.hdf5.writer:stored_bytes",
        checks=("zb_hdf5.formats.hdf5.reader:check_documents",),
        problems="zb_hdf5.formats.hdf5.filters:missing_filters",
        stream="zb_hdf5.formats.hdf5.inspection:is_stream_file",
        stream_reader="zb_hdf5.formats.hdf5.reader:HDF5StreamReader",
        stream_writer="zb_hdf5.formats.hdf5.stream_writer:HDF5ShardWriter",
    ),
    FileFormat(
        "npy",
        ".npy",
        writer="zb_hdf5.formats.npy:NpyWriter",
        as_source=(".npy files of tokens", "tokens/"),
        as_target=(".npy records", "records.npy"),
        other_suffixes=(".npz",),
        indexed=False,
        tokens_only=True,
        size="zb_hdf5.formats.npy:stored_bytes",
        undigested="zb_hdf5.formats.npy:undigested",
    ),
)
#: The one table of file formats; a file that carries the magic of several is taken for the first.
FORMATS: Final = {row.name: row for row in _ROWS}


class _Backends(Mapping[str, FileFormat]):
    """The rows whose files are opened as batches."""

    def __getitem__(self, name: str) -> FileFormat:
        row = FORMATS[name]
        if not row.reader:
            raise KeyError(name)
        return row

    def __iter__(self) -> Iterator[str]:
        return (name for name, row in FORMATS.items() if row.reader)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:  # asked for each of many shards
        return name in FORMATS and bool(FORMATS[name].reader)


BACKENDS: Final[Mapping[str, FileFormat]] = _Backends()


def detect_backend(path: str | os.PathLike[str]) -> str:
    """Return the name of the first backend whose magic bytes a file carries.

    Raises
    ------
    FormatError
        If no backend knows the file.
    """
    path = any_path(path)
    if name := backend_in(path):
        return name
    with open_file(path) as file:
        head = file.read(8)
    known = ", ".join(f"{row.noun} (magic {_load(row.magic)!r})" for row in BACKENDS.values())
    raise FormatError(f"{path}: no known file: expected {known}, or the shards.json of a store, found {head!r}")


def backend_in(path: Path) -> str:
    """Return the name of the first backend whose magic bytes a file carries; "": none."""
    with open_file(path) as file:
        head = file.read(HEAD_BYTES)
    return next((name for name, backend in BACKENDS.items() if backend.has_magic(head)), "")


def open_chunks(path: Path) -> BatchReader:
    """Open a file as what is stored in it: its batches, or the chunks of a stream. No read is checked.

    Raises as `detect_backend`.
    """
    row = FORMATS[detect_backend(path)]
    if row.holds_stream(path):
        return cast("BatchReader", _load(row.stream_reader)(path))
    return row.open(path, verify="none")


def format_of(path: Path) -> FileFormat:
    """Return the row of a file: by its magic bytes, or by its suffix where it is neither batches nor a digested stream.

    Raises as `detect_backend`.
    """
    plain = (row for row in FORMATS.values() if row.undigested and row.suffix == path.suffix)
    return next(plain, None) or FORMATS[detect_backend(path)]


def backend_of_suffix(path: str | os.PathLike[str]) -> str:
    """Return the backend that writes files with the suffix of `path`.

    Raises
    ------
    ConvertError
        If none does.
    """
    path = Path(path)
    for name, backend in BACKENDS.items():
        if path.suffix == backend.suffix:
            return name
    suffixes = " or ".join(backend.suffix for backend in BACKENDS.values())
    raise ConvertError(f"{path}: expected a name that ends in {suffixes}, or backend=")


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
