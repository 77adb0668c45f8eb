"""The first bytes of known formats: a file that has them is never taken for ids without a header.

The one table also has the formats that are not read, each with the way from it to a file that is.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from zb_hdf5.files import ways
from zb_hdf5.files.look import HEAD_BYTES, Look
from zb_hdf5.spec import BATCH_MAGIC, HDF5_MAGIC, HDF5_OFFSETS

PARQUET_MAGIC: Final = b"PAR1"
ARROW_MAGIC: Final = b"ARROW1"
ARROW_STREAM_MAGIC: Final = b"\xff\xff\xff\xff"
NPY_MAGIC: Final = b"\x93NUMPY"
MEGATRON_MAGIC: Final = b"MMIDIDX\x00\x00"
GZIP_MAGIC: Final = b"\x1f\x8b\x08"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
#: The offsets of the magic of HDF5 that are behind the bytes which a look has read.
_HDF5_OFFSETS_BEYOND: Final = tuple(offset for offset in HDF5_OFFSETS if offset >= HEAD_BYTES)
#: The bytes of a text at least: a few ids may look like a shorter one.
MIN_TEXT_BYTES: Final = 16
#: The bytes of texts in UTF-8: no control characters.
TEXT_BYTES: Final = bytes((*b"\t\n\f\r", *range(0x20, 0x7F), *range(0x80, 0x100)))
UINT32: Final = struct.Struct("<I")
UINT64: Final = struct.Struct("<Q")
#: The magic, the length and the root of the first message of an Arrow stream.
ARROW_MESSAGE: Final = struct.Struct("<III")
#: The number of the items of a chunk, and the offset of the first one.
ITEMS_BEGIN: Final = struct.Struct("<II")
#: The version, the tensors and the keys of a GGUF file; the number of records and the list of dimensions of netCDF.
GGUF_BEGIN: Final = struct.Struct("<IQQ")
GGUF_VERSIONS: Final = range(1, 1 << 8)
NETCDF_TAGS: Final = (b"\x00\x00\x00\x00\x00\x00\x00\x00", b"\x00\x00\x00\x0a\x00\x00")
#: The length of a segment of JPEG, and the kinds of the first one.
JPEG_LENGTH: Final = struct.Struct(">H")
JPEG_KINDS: Final = bytes((*range(0xE0, 0xF0), 0xDB, 0xC4, 0xFE))
#: The endings of files that belong to a file of ids, and have none.
SIDECAR_ENDINGS: Final = (".ds.index", ".batch.crc32")
#: JSON of numbers alone.
ONLY_NUMBERS: Final = re.compile(rb"[\d\s,\[\]-]+")
#: The first objects of pickles of protocols 2 and 3: a list, a dictionary, an array, a tensor.
PICKLED_OBJECTS: Final = (b"]q\x00(", b"}q\x00(", b"}q\x00X", b"cnumpy", b"ctorch")
#: The polynomial of crc32c, and the number that is added to one in a TFRecord.
CRC32C_POLYNOMIAL: Final = 0x82F63B78
CRC32C_MASK: Final = 0xA282EAD8


class Signature(NamedTuple):
    """A format, as the beginning of its files tells it.

    Attributes
    ----------
    noun
        Such a file, in messages.
    magics
        The bytes that it begins with, one of them; (): `fits` decides alone.
    way
        A function of a path that returns the words of the way to a file that is read, which end in a line to type;
        None: it is read, in place or by a conversion.
    fits
        A function of a look at the file that decides too, where ids might have the magic.
    offset
        The byte of the magic.
    is_text
        Whether it is text.
    is_of_bytes
        Whether ids of one byte may look like it, as text does.
    header_bytes
        The bytes of its header, after which its ids are read if they are skipped; 0: its ids are not all that follows.
    """

    noun: str
    magics: tuple[bytes, ...] = ()
    way: Callable[[Path], str] | None = None
    fits: Callable[[Look], bool] | None = None
    offset: int = 0
    is_text: bool = False
    is_of_bytes: bool = False
    header_bytes: int = 0

    def is_of(self, look: Look) -> bool:
        """Return whether the file of a look has this signature."""
        if self.magics and not look.start.startswith(self.magics, self.offset):
            return False
        return self.fits is None or self.fits(look)

    def holds_ids(self, itemsize: int, skip_bytes: int) -> bool:
        """Return whether ids of a size, after some bytes, may be read from such a file all the same."""
        return (self.is_of_bytes and itemsize == 1) or 0 < self.header_bytes == skip_bytes

    def words(self, path: Path) -> str:
        """Return the words for a file with this signature, with the way to one that is read if this one is not."""
        return self.noun if self.way is None else f"{self.noun}; {self.way(path)}"


def signature_of(look: Look) -> Signature | None:
    """Return the signature of a file of this machine; None: it has none that is known. Raises as `regular` does."""
    for each in _candidates(look.start):
        if each.is_of(look):
            return each
    return None


def _candidates(start: bytes) -> Iterable[Signature]:
    """Return the signatures that a beginning may have: most ids differ from each magic in the first byte."""
    signed = _BY_FIRST_BYTE.get(start[:1], ())
    may_be_text = not start[:MIN_TEXT_BYTES].translate(None, TEXT_BYTES)
    return (*signed, *_WITHOUT_MAGIC, *(_TEXTS if may_be_text else ()))


def is_hdf5(look: Look) -> bool:
    """Return whether it is HDF5, whose magic may follow a block of the user: a folder has thousands of other files."""
    start = look.start
    if HDF5_MAGIC in start and any(start.startswith(HDF5_MAGIC, offset) for offset in HDF5_OFFSETS):
        return True
    for offset in _HDF5_OFFSETS_BEYOND if len(start) == HEAD_BYTES else ():
        if offset >= look.num_bytes:
            break
        if look.read(len(HDF5_MAGIC), offset) == HDF5_MAGIC:
            return True
    return False


def _is_gguf(look: Look) -> bool:
    if len(look.start) < 4 + GGUF_BEGIN.size:
        return False
    version, num_tensors, num_keys = GGUF_BEGIN.unpack_from(look.start, 4)
    return version in GGUF_VERSIONS and max(num_tensors, num_keys) < look.num_bytes


def _is_netcdf(look: Look) -> bool:
    """Return whether the number of records is followed by a list of dimensions, or by none."""
    return look.start.startswith(NETCDF_TAGS, 12 if look.start[3] == 5 else 8)


def _is_jpeg(look: Look) -> bool:
    """Return whether the first segment is of a known kind, and another one follows it."""
    if len(look.start) < 6 or look.start[3] not in JPEG_KINDS:
        return False
    after = 4 + JPEG_LENGTH.unpack_from(look.start, 4)[0]
    return look.read(1, after) == b"\xff"


def _is_riff(look: Look) -> bool:
    return look.start[8:12] in (b"WEBP", b"WAVE", b"AVI ")


def _is_elf(look: Look) -> bool:
    return look.start[4:7] in (b"\x01\x01\x01", b"\x01\x02\x01", b"\x02\x01\x01", b"\x02\x02\x01")


def _is_sidecar(look: Look) -> bool:
    return look.path.name.endswith(SIDECAR_ENDINGS)


def _is_parquet(look: Look) -> bool:
    end = look.num_bytes - len(PARQUET_MAGIC)
    return end > 0 and look.read(len(PARQUET_MAGIC), end) == PARQUET_MAGIC


def _is_arrow_stream(look: Look) -> bool:
    """Return whether the first message and its root are in the file: ids may be -1, too."""
    if len(look.start) < ARROW_MESSAGE.size:
        return False
    _, length, root = ARROW_MESSAGE.unpack_from(look.start)
    return 0 < root < length < look.num_bytes and not length % 8


def _is_gzip(look: Look) -> bool:
    return len(look.start) >= 18 and not look.start[3] & 0xE0


def _is_bzip2(look: Look) -> bool:
    return look.start[3:4].isdigit() and look.start[4:10] in (b"1AY&SY", b"\x17rE8P\x90")


def _is_pickle(look: Look) -> bool:
    """Return whether it is a pickle: from protocol 4 on by its first frame, else by its first object or its name."""
    if look.start.startswith(PICKLED_OBJECTS, 2):
        return True
    if look.start[1:3] in (b"\x04\x95", b"\x05\x95") and len(look.start) > 11:
        return int(UINT64.unpack_from(look.start, 3)[0]) <= look.num_bytes - 11
    return look.path.suffix in (".pkl", ".pickle")


def _is_safetensors(look: Look) -> bool:
    if look.start[8:9] != b"{":
        return False
    (length,) = UINT64.unpack_from(look.start)
    return 2 <= length <= look.num_bytes - 8 and look.read(1, 7 + length) in (b"}", b" ")


def _begin_of_items(look: Look) -> int:
    """Return the byte after the offsets of the items of a chunk, the last of which is its size; 0: of other files."""
    if len(look.start) < ITEMS_BEGIN.size:
        return 0
    count, first = ITEMS_BEGIN.unpack_from(look.start)
    begin = int(UINT32.size * (count + 2))
    if not count or not begin <= first <= look.num_bytes:
        return 0
    last = look.read(UINT32.size, begin - UINT32.size)
    return begin if last == UINT32.pack(look.num_bytes & 0xFFFFFFFF) else 0


def _is_mds(look: Look) -> bool:
    begin = _begin_of_items(look)
    return bool(begin) and look.read(1, begin) == b"{"


def _is_litdata(look: Look) -> bool:
    begin = _begin_of_items(look)
    return bool(begin) and ITEMS_BEGIN.unpack_from(look.start)[1] == begin


def _is_tfrecord(look: Look) -> bool:
    """Return whether the length of the first record has its crc32c."""
    if len(look.start) < 16 or UINT64.unpack_from(look.start)[0] > look.num_bytes - 16:
        return False
    crc = 0xFFFFFFFF
    for byte in look.start[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ CRC32C_POLYNOMIAL * (crc & 1)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + CRC32C_MASK) & 0xFFFFFFFF
    return look.start[8:12] == UINT32.pack(masked)


def _is_text(look: Look) -> bool:
    """Return whether the beginning is UTF-8 that prints."""
    if len(look.start) < MIN_TEXT_BYTES:
        return False
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(look.start)  # which the end of the head may cut
    except UnicodeDecodeError:
        return False
    return all(each.isprintable() or each in "\n\r\t\f\ufeff" for each in text)


def _is_numbers(look: Look) -> bool:
    return look.start.lstrip()[:1] == b"[" and ONLY_NUMBERS.fullmatch(look.start) is not None


def _is_json(look: Look) -> bool:
    return look.start.lstrip()[:1] in (b"{", b"[") and _is_text(look)


def _is_csv(look: Look) -> bool:
    return look.path.suffix in (".csv", ".tsv") and _is_text(look)


#: The one table of signatures, in the order in which a file is compared with them.
SIGNATURES: Final = (
    Signature("a .batch file", (BATCH_MAGIC,)),
    Signature("an HDF5 file", fits=is_hdf5),
    Signature("a .npy file of numpy", (NPY_MAGIC,)),
    Signature("an .idx file of Megatron", (MEGATRON_MAGIC,)),
    Signature("a Parquet file", (PARQUET_MAGIC,), fits=_is_parquet),
    Signature("an Arrow file", (ARROW_MAGIC,)),
    Signature("an Arrow stream", (ARROW_STREAM_MAGIC,), fits=_is_arrow_stream),
    Signature("a shard of MDS", fits=_is_mds),
    Signature("a chunk of litdata", fits=_is_litdata),
    Signature("a file of lit-gpt", (b"LITPKDS",), ways.of_litgpt, header_bytes=ways.LITGPT_HEADER.size),
    Signature("a zip archive, as .npz and .pt files are", (b"PK\x03\x04", b"PK\x05\x06"), ways.of_zip),
    Signature("a file of safetensors", (), ways.of_safetensors, _is_safetensors),
    Signature("a gzip file", (GZIP_MAGIC,), ways.of_packed("gzip"), _is_gzip),
    Signature("a zstd file", (ZSTD_MAGIC,), ways.of_packed("zstd")),
    Signature("a bzip2 file", (b"BZh",), ways.of_packed("bzip2"), _is_bzip2),
    Signature("an xz file", (b"\xfd7zXZ\x00",), ways.of_packed("xz")),
    Signature("an lz4 file", (b"\x04\x22\x4d\x18",), ways.of_packed("lz4")),
    Signature("a tar archive", (b"ustar",), ways.of_tar, offset=257),
    Signature("a file of TFRecords", (), ways.of_its_library("tensorflow"), _is_tfrecord),
    Signature("an array_record file", (b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f",), ways.of_its_library("array_record")),
    Signature("a SQLite database", (b"SQLite format 3\x00",), ways.of_its_library("sqlite3")),
    Signature("an Avro file", (b"Obj\x01\x04\x14avro", b"Obj\x01\x02\x16avro"), ways.of_its_library("avro")),
    Signature("an ORC file", (b"ORC\x08", b"ORC\n"), ways.of_its_library("pyarrow.orc")),
    Signature("a feather file of version 1", (b"FEA1",), ways.of_its_library("pyarrow.feather")),
    Signature("a file of torch.save", (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19",), ways.of_torch),
    Signature("a 7z archive", (b"7z\xbc\xaf\x27\x1c",), ways.of_7z),
    Signature("a GGUF file", (b"GGUF",), ways.no_ids, _is_gguf),
    Signature("a netCDF file", (b"CDF\x01", b"CDF\x02", b"CDF\x05"), ways.of_its_library("netCDF4"), _is_netcdf),
    Signature("a file of MATLAB", (b"MATLAB 5.0 MAT-file",), ways.of_its_library("scipy.io")),
    Signature("a picture (PNG)", (b"\x89PNG\r\n\x1a\n",), ways.no_ids),
    Signature("a picture (JPEG)", (b"\xff\xd8\xff",), ways.no_ids, _is_jpeg),
    Signature("a picture (GIF)", (b"GIF87a", b"GIF89a"), ways.no_ids),
    Signature("a picture, a sound or a film (RIFF)", (b"RIFF",), ways.no_ids, _is_riff),
    Signature("a PDF", (b"%PDF-1.", b"%PDF-2."), ways.no_ids),
    Signature("a program (ELF)", (b"\x7fELF",), ways.no_ids, _is_elf),
    Signature("a file that belongs to a file of ids", (), ways.of_sidecar, _is_sidecar),
    Signature("a pickle", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), ways.of_pickle, _is_pickle),
    Signature("a table of text (CSV)", (), ways.of_csv, _is_csv, is_text=True),
    Signature("numbers in JSON", (), ways.of_json, _is_numbers, is_text=True),
    Signature("JSON", fits=_is_json, is_text=True),
    Signature("text", (), ways.of_text, _is_text, is_text=True, is_of_bytes=True),
)
_BY_FIRST_BYTE: Final[dict[bytes, list[Signature]]] = {}
for _each in SIGNATURES:
    for _first in {magic[:1] for magic in _each.magics if not _each.offset}:
        _BY_FIRST_BYTE.setdefault(_first, []).append(_each)
_TEXTS: Final = tuple(each for each in SIGNATURES if each.is_text)
_WITHOUT_MAGIC: Final = tuple(each for each in SIGNATURES if each.offset or not (each.magics or each.is_text))
