"""Another trainer's flat tokens: `.tok` files, a header of 16 bytes and uint16 ids, as source and as target."""

import struct

import numpy as np

from zb_hdf5 import ArgumentError, FormatError, IncompleteError
from zb_hdf5.files.paths import regular, require_bytes
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
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
    return num_tokens


class TokWriter(NpyWriter):
    """Like a `.npy` file, with another header."""

    backend = "tok"

    def _header(self, num_batches):
        return HEADER.pack(MAGIC, num_batches * self.meta.batch_tokens)


class TokFormat(FlatFormat):
    sign = "TOKENS16"

    def fits(self, look):
        return True

    def facts(self, look):
        num_tokens = read_tok_header(look.path)
        return FlatFacts(look.text, num_tokens, np.dtype("<u2"), HEADER.size, identity=look.identity)

    def count(self, look):
        return self.facts(look).num_tokens, ".tok files hold no digests"

    def require(self, meta, path):
        super().require(meta, path)
        if meta.dtype != np.uint16:
            raise ArgumentError(f"{path}: .tok files hold uint16 tokens, found {meta.dtype}: pass --dtype uint16")


ROW = FormatRow(
    name="tok",
    noun=".tok files of tokens",
    suffixes=(".tok",),
    place=f"{__name__}:TokFormat",
    writer=f"{__name__}:TokWriter",
    is_flat=True,
    holds_documents=False,
    takes_batches=True,
    as_target=(".tok tokens", "tokens.tok"),
    tokens_only=True,
    default_dtype="uint16",
)


def plug_in():
    """Make the format known, as a program does before it imports the commands."""
    FORMATS["tok"] = ROW
