"""`.npy` files: the header of one, read without its array, and the writer of one."""

from __future__ import annotations

import io
import math
import os
import re
import tokenize
from functools import cache
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from zb_hdf5.errors import ConvertError, FormatError, IncompleteError, Remedy, conversion_call
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import regular, require_bytes
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.files.ranges import Run
from zb_hdf5.files.signatures import NPY_MAGIC, signature_of
from zb_hdf5.formats.batch_writer import FileWriter, ShardInfo
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.spec import BATCHES, TokenArray, require_integers

#: Shape, Fortran order, dtype, and byte offset of the data.
Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[Any], int]
NPY_MISSING: Final = ".npy files hold no digests"
#: The end of messages about arrays that are not read in place.
UNREAD_REMEDY: Final = "convert them to a store, which keeps digests from then on, or keep their sha256sum"
#: The bytes of a header before its text: the magic, the version and the length of the text.
FIRST_BYTES: Final = 10
#: Records of a batch in a line to type, as a conversion makes them by default.
RECORDS_OF_A_BATCH: Final = 32
#: Bytes of a file that have the header of an array of integers, as numpy writes it.
PLAIN_HEADER_BYTES: Final = 256
#: Such a header, of one axis or two.
PLAIN_HEADER: Final = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)\{'descr': '(?P<dtype>\|[iu]1|[<>][iu][248])', "
    rb"'fortran_order': (?P<fortran>False|True), 'shape': \((?P<shape>\d{1,18},(?: \d{1,18})?)\), \} *\n",
    re.DOTALL,
)
#: The errors of numpy for a header that it cannot parse.
MALFORMED_HEADER: Final = (
    ValueError,
    TypeError,
    KeyError,
    SyntaxError,
    tokenize.TokenError,
    OverflowError,
    RecursionError,
    MemoryError,
)


def npy_header(look: Look) -> Header:
    """Return (shape, Fortran order, dtype, byte offset of the data) of a `.npy` file that is as long as its array."""
    plain = PLAIN_HEADER.match(look.read(PLAIN_HEADER_BYTES, 0))
    if plain is not None and plain.end() == FIRST_BYTES + int.from_bytes(plain["length"], "little"):
        shape = tuple(map(int, filter(None, plain["shape"].split(b","))))
        dtype = _dtype_named(plain["dtype"])
        if plain.end() + math.prod(shape) * dtype.itemsize == look.num_bytes:
            return shape, plain["fortran"] == b"True", dtype, plain.end()
    return _parse_header(look)


@cache
def _dtype_named(name: bytes) -> np.dtype[Any]:
    return np.dtype(name.decode())  # one for all files, of which a folder has thousands


def _parse_header(look: Look) -> Header:
    """Return the facts of any header; the parser of numpy takes ten times as long as a look at its bytes."""
    path = look.path
    with open(path, "rb", opener=regular) as file:
        try:
            # version 3 differs from 2 in the encoding of field names, which arrays of integers do not have
            one = np.lib.format.read_array_header_1_0
            two = np.lib.format.read_array_header_2_0
            read = {(1, 0): one, (2, 0): two, (3, 0): two}[np.lib.format.read_magic(file)]
            shape, fortran, dtype = read(file)
            if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize >= 2**63:
                raise ValueError(f"impossible shape {shape}")
        except MALFORMED_HEADER as error:
            kind = IncompleteError if str(error).startswith("EOF") else FormatError
            signature = signature_of(look)
            facts = f"{path}: malformed .npy header: {error or type(error).__name__}"
            if signature is not None and signature.way is not None:
                raise FormatError(f"{path}: expected a .npy file, found {signature.words(path)}") from error
            raise kind(facts, remedy=None if signature is not None else Remedy.SOURCE_DTYPE) from error
        if not dtype.hasobject:  # arrays of objects are pickled, and refused by whoever reads them
            end = file.tell() + math.prod(shape) * dtype.itemsize
            require_bytes(end, file.fileno(), path, f"an array of shape {shape}")
            size = os.fstat(file.fileno()).st_size
            if size > end:
                raise FormatError(
                    f"{path}: expected {end:,} bytes for an array of shape {shape}, found {size:,}: it has more than "
                    "one array, or is damaged; save each array in a file of its own"
                )
        return shape, fortran, dtype, file.tell()


def refusal_of(shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any]) -> str:
    """Return what is expected of an array that is not read in place, and what is found; "": it is read."""
    if len(shape) not in (1, 2) or dtype.kind not in "iu":
        return f"expected an array of integers of one axis or two, found shape {shape} {dtype}"
    if len(shape) == 2 and not shape[1]:
        return f"expected records of one token or more, found shape {shape}"
    if fortran and len(shape) == 2 and min(shape) > 1:
        return "expected records whose tokens follow each other, found Fortran order"
    return ""


class NpyArrays(FlatFormat):
    """`.npy` files of integers: of one axis streams, each of which counts as one document, of two axes records."""

    sign: ClassVar = "a header of numpy"
    holds_records: ClassVar = True

    def fits(self, look: Look) -> bool:
        return look.start.startswith(NPY_MAGIC)

    def facts(self, look: Look) -> FlatFacts:
        header = shape, fortran, dtype, byte_offset = npy_header(look)
        if len(shape) == 1 and dtype.kind in "iu":  # a folder has thousands of them
            return FlatFacts(look.text, shape[0], dtype, byte_offset, identity=look.identity)
        if refusal := refusal_of(shape, fortran, dtype):
            line = ""
            if fortran and dtype.kind in "iu" and len(shape) == 2:
                batch_size = max(1, min(shape[0], RECORDS_OF_A_BATCH))
                line = f": {conversion_call(look.path, 'hdf5', batch_size=batch_size, seq_len=shape[1])}"
            raise FormatError(f"{look.text}: {refusal}{line}")
        return _facts_of(look, header)

    def facts_once(self, look: Look) -> FlatFacts:
        """Return the facts of an array that a conversion reads once, which may be in Fortran order.

        Raises
        ------
        ConvertError
            If it is not an array of integers of one axis or two.
        """
        header = shape, _, dtype, _ = npy_header(look)
        if len(shape) not in (1, 2):
            raise ConvertError(f"{look.path}: expected a 1-D stream or 2-D records, found shape {shape}")
        require_integers(np.empty(0, dtype), look.path)
        return _facts_of(look, header)

    def count(self, look: Look) -> tuple[int, str]:
        shape, fortran, dtype, _ = npy_header(look)
        remedy = UNREAD_REMEDY if refusal_of(shape, fortran, dtype) else Remedy.DIGESTS.about(str(look.path))
        return math.prod(shape), f"{NPY_MISSING}; {remedy}"


def _facts_of(look: Look, header: Header) -> FlatFacts:
    """Return the facts of an array of integers of one axis or two."""
    shape, fortran, dtype, byte_offset = header
    found = FlatFacts(look.text, math.prod(shape), dtype, byte_offset, identity=look.identity)
    if len(shape) == 1:
        return found
    return found._replace(record_tokens=shape[1], by_columns=fortran and min(shape) > 1)


class NpyWriter(FileWriter):
    """Writes a `.npy` file of records, shape `(num_batches * batch_size, seq_len)`, in batch order."""

    backend: ClassVar[str] = "npy"

    def _begin(self) -> None:
        self._data_offset = len(self._header(self._expected_batches))

    def _header(self, num_batches: int) -> bytes:
        header = io.BytesIO()
        shape = (num_batches * self.meta.batch_size, self.meta.seq_len)
        description = {"descr": self.meta.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, description)
        return header.getvalue()

    def _append(self, batches: TokenArray, fields: object) -> None:
        write_fully(self._file.fd, batches, self._data_offset + self.num_batches * self.meta.batch_bytes)

    def _complete(self, info: ShardInfo) -> ShardInfo:
        header = self._header(info.num_batches)
        if len(header) != self._data_offset:
            raise ConvertError(f"{info.path}: expected {self._expected_batches:,} batches, found {info.num_batches:,}")
        write_fully(self._file.fd, header, 0)
        run = Run(self._data_offset, self.meta.batch_bytes, info.num_batches)
        return info._replace(columns={BATCHES: (run,)})
