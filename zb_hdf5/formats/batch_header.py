"""The header of a `.batch` file, and the size of the whole."""

from __future__ import annotations

import struct
from typing import Final

from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError
from zb_hdf5.spec import BATCH_MAGIC, BATCH_VERSION, CODE_BY_DTYPE, DTYPE_BY_CODE, HEADER_BYTES, U32_MAX, StoreMeta

#: (offset, struct code, field) in file order; little-endian, no alignment gaps; reserved from byte 40 on.
BATCH_HEADER_FIELDS: Final = (
    (0, "8s", "magic"),
    (8, "I", "version"),
    (12, "I", "batch_size"),
    (16, "I", "seq_len"),
    (20, "Q", "num_batches"),
    (28, "I", "dtype"),
    (32, "I", "seed"),
    (36, "I", "total_records"),
)
_HEADER: Final = struct.Struct("<" + "".join(code for _, code, _ in BATCH_HEADER_FIELDS))


def pack_header(meta: StoreMeta, num_batches: int) -> bytes:
    """Return the 4096 header bytes of a `.batch` file.

    Raises
    ------
    FormatError
        If `seed` or `total_records` does not fit the header's 32 bits. Nothing is ever wrapped.
    """
    for name in ("seed", "total_records"):
        value = getattr(meta, name)
        if value > U32_MAX:
            raise FormatError(
                f"{name} {value:,} does not fit the 32 bits of a .batch header (at most {U32_MAX:,}); "
                "use the hdf5 backend, or shard the store"
            )
    fields = _HEADER.pack(
        BATCH_MAGIC, BATCH_VERSION, meta.batch_size, meta.seq_len, num_batches,
        CODE_BY_DTYPE[meta.dtype], meta.seed, meta.total_records,
    )  # fmt: skip
    return fields.ljust(HEADER_BYTES, b"\0")


def unpack_header(header: bytes, path: object) -> tuple[StoreMeta, int]:
    """Parse the first 4096 bytes of a `.batch` file.

    Returns
    -------
    (meta, num_batches)

    Raises
    ------
    FormatError
        If the magic, version, dtype code or sizes are not ones of this format.
    IncompleteError
        If fewer than 4096 bytes are given.
    """
    if header[:8] != BATCH_MAGIC:
        raise FormatError(f"{path}: not a .batch file: expected magic {BATCH_MAGIC!r}, found {header[:8]!r}")
    if len(header) < HEADER_BYTES:
        raise IncompleteError(f"{path}: expected a header of {HEADER_BYTES} bytes, found {len(header)}")
    _, version, batch_size, seq_len, num_batches, code, seed, total_records = _HEADER.unpack_from(header)
    if version != BATCH_VERSION:
        raise FormatError(f"{path}: expected .batch version {BATCH_VERSION}, found {version}")
    if code not in DTYPE_BY_CODE:
        raise FormatError(
            f"{path}: expected dtype code {' or '.join(map(str, DTYPE_BY_CODE))}, found {code}; "
            "was it written by a newer version?"
        )
    try:
        meta = StoreMeta(batch_size, seq_len, DTYPE_BY_CODE[code], seed, total_records)
    except ArgumentError as error:
        raise FormatError(f"{path}: bad header: {error}") from error
    return meta, num_batches


def batch_file_bytes(meta: StoreMeta, num_batches: int) -> int:
    """Exact size of a `.batch` file."""
    return HEADER_BYTES + num_batches * meta.padded_batch_bytes
