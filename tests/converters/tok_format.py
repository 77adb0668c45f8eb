"""Another trainer's flat tokens: `.tok` files, a header of 16 bytes and uint16 ids, as source and as target."""

import struct

import numpy as np

from zb_hdf5 import ArgumentError, FormatError, IncompleteError
from zb_hdf5.converters.npy_source import ArrayKind, open_arrays
from zb_hdf5.converters.sources import SOURCES, SourceKind
from zb_hdf5.files.paths import regular, require_bytes
from zb_hdf5.formats.format import Format
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.formats.npy import NpyWriter
from zb_hdf5.store.format_list import FORMATS

MAGIC = b"TOKENS16"
HEADER = struct.Struct("<8sQ")


def read_tok_header(path):
    with open(path, "rb", opener=regular) as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise IncompleteError(f"{path}: expected a header of {HEADER.size} bytes, found {len(head)}")
        magic, num_tokens = HEADER.unpack(head)
        if magic != MAGIC:
            raise FormatError(f"{path}: not a .tok file: expected magic {MAGIC!r}, found {magic!r}")
        require_bytes(HEADER.size + 2 * num_tokens, file.fileno(), path, f"{num_tokens:,} tokens")
    return (num_tokens,), False, np.dtype("<u2"), HEADER.size


TOK = ArrayKind("tok", ".tok", read_tok_header)


def open_tok(paths, settings):
    return open_arrays(paths, settings, TOK)


SOURCE = SourceKind(
    noun=".tok files of tokens",
    example="tokens/ {target} --batch-size 32",
    opener=f"{__name__}:open_tok",
    roles=SOURCES["npy"].roles,
    several=True,
    suffixes=(".tok",),
)


class TokWriter(NpyWriter):
    """Like a `.npy` file, with another header."""

    backend = "tok"

    def _header(self, num_batches):
        return HEADER.pack(MAGIC, num_batches * self.meta.batch_tokens)


class TokFormat(Format):
    def count(self, look):
        return read_tok_header(look.path)[0][0], ".tok files hold no digests"


class TokRow(FormatRow):
    def require(self, meta, path):
        super().require(meta, path)
        if meta.dtype != np.uint16:
            raise ArgumentError(f"{path}: .tok files hold uint16 tokens, found {meta.dtype}: pass --dtype uint16")


ROW = TokRow(
    name="tok",
    noun=".tok files of tokens",
    suffixes=(".tok",),
    place=f"{__name__}:TokFormat",
    writer=f"{__name__}:TokWriter",
    holds_documents=False,
    takes_batches=True,
    as_target=(".tok tokens", "tokens.tok"),
    tokens_only=True,
    default_dtype="uint16",
)


def plug_in():
    """Make the format known, as a program does before it imports the commands."""
    FORMATS["tok"], SOURCES["tok"] = ROW, SOURCE
