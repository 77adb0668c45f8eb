"""The `.bin` files of llm.c and modded-nanogpt, which have a header, and the `.bin` files of nanoGPT, which have none.

The header of llm.c is 256 int32: a magic number, a version and the number of ids; then come the ids. Source:
`dev/data/data_common.py` of llm.c. The files of nanoGPT are the bytes of a memmap: nobody can tell their dtype from
them. The `meta.pkl` beside them is never read.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from zb_hdf5.errors import ConvertError, FormatError, IncompleteError
from zb_hdf5.files.listing import listed
from zb_hdf5.files.look import Look
from zb_hdf5.formats.document_writer import FlatWriter
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.spec import MEGATRON_INDEX_SUFFIX, TokenArray

LLMC_HEADER_BYTES: Final = 256 * 4
#: The first three of them: the magic number, the version and the number of ids.
FACTS: Final = struct.Struct("<iii")
MAGIC_BYTES: Final = 4
#: Magic number -> version and dtype of the ids.
TOKEN_MAGICS: Final[dict[int, tuple[int, np.dtype[Any]]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
#: Ids of a file at most: their number is an int32.
MAX_TOKENS: Final = 2**31 - 1
#: The ending of files of raw ids that are not arrays of numpy.
RAW_NPY_SUFFIX: Final = ".npy"
#: The magic number of evaluation files, which hold questions and no stream of tokens.
EVALUATION_MAGIC: Final = 20240522


class BinFiles(FlatFormat):
    """`.bin` files of llm.c, modded-nanogpt and nanoGPT. The documents in them are not told apart.

    Raw ids in a folder may be named `.npy`, as OLMo names them: read as these, they have no documents.
    """

    sign: ClassVar = "a header that begins with 20240520 or 20240801"

    def files(self, look: Look) -> list[str]:
        found = super().files(look)
        if not self.read_as.lacks_header or found or not look.is_dir:
            return found
        return self._ids_in(look, listed(look, RAW_NPY_SUFFIX).texts)

    def fits(self, look: Look) -> bool:
        if self.read_as.lacks_header:
            return True
        magic = int.from_bytes(look.read(MAGIC_BYTES, 0), "little")
        return magic in TOKEN_MAGICS or magic == EVALUATION_MAGIC

    def facts(self, look: Look) -> FlatFacts:
        if self.read_as.lacks_header:
            return self.facts_without_header(look)
        path = look.text
        head = look.read(FACTS.size, 0)
        size = look.num_bytes
        magic = int.from_bytes(head[:MAGIC_BYTES], "little")
        if magic == EVALUATION_MAGIC:
            raise FormatError(f"{path}: expected tokens, found an evaluation file of llm.c")
        if magic not in TOKEN_MAGICS:
            raise FormatError(
                f"{path}: expected {self.sign}, as other files have it, found {magic}; restore it, or move it to "
                "another folder"
            )
        if len(head) < FACTS.size:
            raise IncompleteError(f"{path}: expected a header of {LLMC_HEADER_BYTES} bytes, found {size}")
        _, version, num_tokens = FACTS.unpack(head)
        known, dtype = TOKEN_MAGICS[magic]
        if (size - LLMC_HEADER_BYTES) // dtype.itemsize > MAX_TOKENS:
            raise FormatError(
                f"{path}: expected at most {MAX_TOKENS:,} ids, which a header of llm.c can count, found a file of "
                f"{size:,} bytes"
            )
        if version != known or num_tokens < 0:
            raise FormatError(
                f"{path}: expected version {known} of llm.c's tokens and their number, found version {version} and "
                f"{num_tokens:,}"
            )
        end = LLMC_HEADER_BYTES + num_tokens * dtype.itemsize
        if size != end:
            raise IncompleteError(f"{path}: expected {end:,} bytes for {num_tokens:,} ids, found {size:,}")
        return FlatFacts(path, num_tokens, dtype, LLMC_HEADER_BYTES, identity=look.identity)


class BinWriter(FlatWriter):
    """Writes the bytes of the ids alone, as nanoGPT does. An `.idx` beside them would be read with the new ids."""

    backend: ClassVar = "bin"
    suffix: ClassVar = ".bin"

    @classmethod
    def sidecars(cls, path: Path) -> list[Path]:
        return [path.with_suffix(MEGATRON_INDEX_SUFFIX)]


class LlmcWriter(BinWriter):
    """Writes a `.bin` with the header of llm.c, which tells the dtype and the number of the ids."""

    backend: ClassVar = "llmc"
    token_offset: ClassVar = LLMC_HEADER_BYTES

    def _write_ids(self, tokens: TokenArray, start: int) -> None:
        if self.token_count + len(tokens) > MAX_TOKENS:
            raise ConvertError(
                f"{self.path}: expected at most {MAX_TOKENS:,} ids, which a header of llm.c can count, found more: "
                "pass a larger number of shards",
                options=["shards"],
            )
        super()._write_ids(tokens, start)

    def _complete(self) -> None:
        header = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
        magic, version = next((each, found[0]) for each, found in TOKEN_MAGICS.items() if found[1] == self.dtype)
        header[:3] = magic, version, self.token_count
        self._ids.write_at(0, header)
