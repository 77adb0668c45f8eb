"""The file formats: a class for each, with its facts as attributes and its code as methods.

A new format is one file with a reader and a writer, and one class in `FORMATS`: no other code names a format. The
methods import their modules themselves, since the command line makes its commands of this table without numpy.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from zb_hdf5.errors import ArgumentError, BackendError, ConvertError, FormatError, Remedy, UnverifiableError
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import Identity, on_failure
from zb_hdf5.read_as import AS_STORED, ReadAs

if TYPE_CHECKING:
    from zb_hdf5.formats.batch_reader import BatchReader
    from zb_hdf5.formats.batch_writer import FileWriter
    from zb_hdf5.formats.broken_file import BrokenFile
    from zb_hdf5.formats.h5_column import Column
    from zb_hdf5.spec import StoreMeta


class FileFormat:
    """A file format. The defaults describe a format that holds all that a store may have.

    Attributes
    ----------
    name, suffix
        Its name, and the suffix of its files.
    noun
        A file of it, in messages.
    as_source, as_target
        Its name in the help of conversions, and an example of a path; None: no command.
    other_suffixes
        Suffixes of such files of another origin.
    reader, writer
        "module:class" of the reader and the writer of batches; "": it has none.
    magic_name
        "module:name" of the first bytes of a file; "": only its suffix marks it.
    magic_offsets_name
        "module:name" of the offsets at which the magic bytes may stand; "": they are the first ones.
    holds_batches
        Whether a file has batches, and a folder is a store with a `shards.json`; else records without digests.
    has_axes
        Whether files of other programs have arrays of it whose axes may be told.
    tokens_only
        Whether a file has neither fields, documents, streams, codecs, datasets of other programs nor guarded counts,
        and does not grow.
    any_layout
        Options of its reader that open batches and streams alike.
    has_sidecar
        Whether the crc32 rows of a file are in a file of their own.
    uint16_note
        The trouble that other readers have with uint16 tokens.
    default_dtype
        The dtype of new tokens. "auto": the smaller one that fits; "uint32" if other readers know no other one.
    """

    name: str
    suffix: str
    noun = ""
    as_source: tuple[str, str] | None = None
    as_target: tuple[str, str] | None = None
    other_suffixes: tuple[str, ...] = ()
    reader = ""
    writer = ""
    magic_name = ""
    magic_offsets_name = ""
    holds_batches = True
    has_axes = False
    tokens_only = False
    any_layout: ClassVar[dict[str, Any]] = {}
    has_sidecar = False
    uint16_note = ""
    default_dtype = "auto"

    def magic(self) -> bytes:
        return _named(self.magic_name) if self.magic_name else b""

    def magic_offsets(self) -> tuple[int, ...]:
        return _named(self.magic_offsets_name) if self.magic_offsets_name else (0,)

    def writer_class(self) -> type[FileWriter]:
        return _named(self.writer)  # type: ignore[no-any-return]

    def open(self, path: Path, **options: Any) -> BatchReader:
        """Open a file of this format; `options` go to its reader."""
        return _named(self.reader)(path, **options)  # type: ignore[no-any-return]

    def open_column(
        self,
        path: Path,
        meta: StoreMeta,
        access: str,
        *,
        identity: Identity | None = None,
        read_as: ReadAs = AS_STORED,
        column: Column | None = None,
    ) -> BatchReader:
        """Open a file of a store as one of its columns. No read is checked.

        Parameters
        ----------
        meta
            The column: the tokens of the store, as batches or as chunks of a stream, or the values of a field.
        access, read_as
            As for `open_reader`.
        identity
            The identity that the file had before; another file of this name is refused. None: any file.
        column
            The column of an HDF5 file as a look has found it; None: look now.
        """
        return self.open(path, access=access, verify="none")

    def begin(self, path: str | os.PathLike[str], meta: StoreMeta, **options: Any) -> FileWriter:
        """Begin a file of this format; see `FileWriter`. Raises as `require`, and for fields that it cannot hold."""
        self.require(meta, Path(path))
        if meta.fields and self.tokens_only:
            raise ArgumentError(f"{path}: {self.name} files hold tokens only: write fields to an HDF5 file")
        return self.writer_class()(path, meta, **options)

    def column_of(self, path: Path, read_as: ReadAs) -> Column | None:
        """Look into a file whose tokens may be batches or a stream, or of another program; None: it has batches."""
        return None

    def total_bytes(self, meta: StoreMeta, num_batches: int) -> int:
        """Return about how many bytes these batches and their fields take."""
        fields = (meta.of_field(field.name).padded_batch_bytes for field in meta.fields)
        return self.writer_class().stored_bytes(meta, num_batches) + num_batches * sum(fields)

    def require(self, meta: StoreMeta, path: Path) -> None:
        """Raise `ArgumentError` if a file of this format cannot hold such batches."""
        if meta.codec != "none" and self.tokens_only:
            raise ArgumentError(f"{path}: {self.name} files are never compressed: leave out the codec {meta.codec}")

    def open_broken(self, path: Path) -> BrokenFile:
        """Open a damaged or unfinished file."""
        from zb_hdf5.formats.broken_file import BrokenFile

        reader = open_chunks(path)
        with on_failure(reader.close):
            return BrokenFile(reader, reader.digests.crc32(), "" if reader.complete else "its writer has not finished")

    def count(self, look: Look) -> tuple[int, str]:
        """Return the number of tokens of a file without digests, and the reason why it cannot be verified."""
        raise NotImplementedError  # of a format with digests


class BatchFormat(FileFormat):
    """The native `.batch` file."""

    name = "batch"
    suffix = ".batch"
    noun = "a .batch file"
    as_source = as_target = ("a .batch store", "train-batch")
    reader = "zb_hdf5.formats.native:BatchFileReader"
    writer = "zb_hdf5.formats.native:BatchFileWriter"
    magic_name = "zb_hdf5.spec:BATCH_MAGIC"
    has_sidecar = tokens_only = True
    default_dtype = "uint32"
    uint16_note = (
        "uint16 .batch files are an extension: other ZeroBatch v2 readers take the ids for uint32 and return wrong ones"
    )

    def open_broken(self, path: Path) -> BrokenFile:
        from zb_hdf5.formats.native import open_broken

        return open_broken(path)


class HDF5Format(FileFormat):
    """The HDF5 batch store and token stream."""

    name = "hdf5"
    suffix = ".h5"
    noun = "an HDF5 file"
    as_source = as_target = ("an HDF5 store", "train-h5")
    other_suffixes = (".hdf5", ".hdf", ".he5")
    has_axes = True
    reader = "zb_hdf5.formats.h5_reader:HDF5Reader"
    writer = "zb_hdf5.formats.h5_writer:HDF5BatchWriter"
    magic_name = "zb_hdf5.spec:HDF5_MAGIC"
    magic_offsets_name = "zb_hdf5.spec:HDF5_OFFSETS"
    any_layout: ClassVar = {"layout": None}

    def column_of(self, path: Path, read_as: ReadAs) -> Column | None:
        from zb_hdf5.formats.foreign import warn_of_mask
        from zb_hdf5.formats.inspection import look_at

        warn_of_mask(read_as)
        return look_at(path, None, read_as=read_as)

    def open_column(
        self,
        path: Path,
        meta: StoreMeta,
        access: str,
        *,
        identity: Identity | None = None,
        read_as: ReadAs = AS_STORED,
        column: Column | None = None,
    ) -> BatchReader:
        from zb_hdf5.spec import BATCHES_LAYOUT

        if meta.field is None and meta.layout == BATCHES_LAYOUT:
            return self.open(path, access=access, verify="none")
        from zb_hdf5.formats.h5_reader import HDF5Reader

        return HDF5Reader(
            path,
            access,
            "none",
            meta.layout,
            field="" if meta.field is None else meta.field.name,
            read_as=read_as,
            identity=identity,
            column=column,
        )


class NpyFormat(FileFormat):
    """`.npy` files of records or of a stream: no batches, no digests."""

    name = "npy"
    suffix = ".npy"
    noun = "a .npy file"
    as_source = (".npy files of tokens", "tokens/")
    as_target = (".npy records", "records.npy")
    other_suffixes = (".npz",)
    writer = "zb_hdf5.formats.npy:NpyWriter"
    holds_batches = False
    has_axes = True
    tokens_only = True

    def count(self, look: Look) -> tuple[int, str]:
        from zb_hdf5.formats.npy import NPY_MISSING, UNREAD_REMEDY, npy_header, refusal_of

        shape, fortran, dtype, _ = npy_header(look)
        remedy = UNREAD_REMEDY if refusal_of(shape, fortran, dtype) else Remedy.DIGESTS.about(str(look.path))
        return math.prod(shape), f"{NPY_MISSING}; {remedy}"


def _named(text: str) -> Any:
    """Import the class that is named by "module:class"."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)


#: The one table of file formats; a file that carries the magic of several is taken for the first.
FORMATS: Final[dict[str, FileFormat]] = {row.name: row for row in (BatchFormat(), HDF5Format(), NpyFormat())}


def backends() -> dict[str, FileFormat]:
    """Return the formats whose files are opened as batches."""
    return {name: row for name, row in FORMATS.items() if row.holds_batches}


def detect_backend(look: Look) -> str:
    """Return the name of the first backend whose magic bytes a file carries."""
    if name := backend_in(look):
        return name
    raise no_known_file(look)


def no_known_file(look: Look) -> FormatError:
    """Return the error of a file that carries the magic bytes of no backend."""
    path = look.path
    head = look.start[:8]
    known = ", ".join(f"{row.noun} (magic {row.magic()!r})" for row in backends().values())
    ours = {".partial", *(suffix for row in FORMATS.values() for suffix in (row.suffix, *row.other_suffixes))}
    remedy = None if path.suffix in ours else Remedy.CONVERT
    facts = (
        f"{path}: no known file: expected a store, a stream, {known}, found {repr(head) if head else 'an empty file'}"
    )
    return FormatError(facts, remedy=remedy, at=path)


def backend_in(look: Look) -> str:
    """Return the name of the first backend whose magic bytes a file carries; "": none."""
    for name, row in backends().items():
        magic = row.magic()
        if magic and any(_has_at(look, offset, magic) for offset in row.magic_offsets()):
            return name
    return ""


def _has_at(look: Look, offset: int, magic: bytes) -> bool:
    """Return whether a file has some bytes at an offset; of an object its first bytes tell: more are a request."""
    if look.is_far or offset < len(look.start):
        return look.start.startswith(magic, offset)
    return look.read(len(magic), offset) == magic


def open_chunks(path: Path, read_as: ReadAs = AS_STORED) -> BatchReader:
    """Open a file as its batches, or as the chunks of a stream. No read is checked.

    A dataset of another program, which may be chosen, is refused by an `UnverifiableError` where it has no digest:
    nothing in it can be compared, saved or indexed.
    """
    with Look(path) as look:
        row = FORMATS[detect_backend(look)]
    chosen = {"read_as": read_as} if read_as.names_dataset else {}
    reader = row.open(path, verify="none", **row.any_layout, **chosen)
    if reader.foreign_dataset is not None and reader.sha256 is None:
        reader.close()
        from zb_hdf5.formats.foreign import NO_DIGESTS  # h5py, by which it was opened

        facts = f"{path}: {reader.foreign_dataset}: {NO_DIGESTS}"
        raise UnverifiableError(facts, remedy=Remedy.DIGESTS, at=path)
    return reader


def hdf5_suffixes() -> tuple[str, ...]:
    """Return the endings of the names of HDF5 files."""
    row = FORMATS["hdf5"]
    return (row.suffix, *row.other_suffixes)


def hdf5_files(folder: Path) -> list[Path]:
    """Return the files in and below a folder that are named as HDF5 files are. See `listed`."""
    from zb_hdf5.files.listing import listed  # numpy, which the help of the commands does not need

    return [*listed(folder, *hdf5_suffixes()).files]


def require_datasets(look: Look, read_as: ReadAs) -> None:
    """Raise `BackendError` if a dataset, or its axes, are named of files that have none, or that are in a store."""
    if not read_as.names_dataset:
        return
    from zb_hdf5.files.listing import listed  # numpy, which the help of the commands does not need
    from zb_hdf5.spec import INDEX_NAME

    path = look.path
    name, value = next(iter(read_as.given.items()))
    kinds = [row for row in FORMATS.values() if row.has_axes and not (read_as.needs_hdf5 and row.tokens_only)]
    facts = f"{path}: {name}={value!r} needs {' or '.join(row.noun for row in kinds)}"
    if look.is_dir or path.name == INDEX_NAME:
        is_local = look.is_dir and not look.is_far
        suffixes = [suffix for row in kinds for suffix in (row.suffix, *row.other_suffixes)]
        if not is_local or (path / INDEX_NAME).exists() or not listed(path, *suffixes).files:
            raise BackendError(f"{facts}, found a folder", options=[name])
        return
    found = format_of(look)
    if found not in kinds:
        raise BackendError(f"{facts}, found a {found.name!r} file", options=[name])


def format_of(look: Look) -> FileFormat:
    """Return the format of a file: by its magic bytes, or by the suffix of a format without batches."""
    plain = (row for row in FORMATS.values() if not row.holds_batches and row.suffix == look.path.suffix)
    return next(plain, None) or FORMATS[detect_backend(look)]


def backend_of_suffix(path: str | os.PathLike[str]) -> str:
    """Return the backend that writes files with the suffix of `path`."""
    names = {row.suffix: name for name, row in backends().items()}
    suffix = Path(path).suffix
    if suffix not in names:
        raise ConvertError(f"{path}: expected a name that ends in {' or '.join(names)}, or backend=")
    return names[suffix]
