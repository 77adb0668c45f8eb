"""Another trainer's documents: Megatron-LM's `.bin` with the ids and `.idx` with the documents, as a source."""

import struct

import numpy as np

from zb_hdf5 import FormatError, IncompleteError
from zb_hdf5.files.listing import files_at
from zb_hdf5.files.paths import regular, require_bytes
from zb_hdf5.formats.document_source import DocumentGroup, DocumentSource, TokenizedDocuments
from zb_hdf5.formats.format import RowsFormat
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.store.format_list import FORMATS

MAGIC = b"MMIDIDX\x00\x00"
#: Magic, version, code of the dtype, number of sequences, number of edges of documents.
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}
#: Tokens that are read at once.
BLOCK_TOKENS = 1 << 20


class Megatron:
    """One pair of files: the dtype of the ids, and the edges of the documents in tokens. Picklable."""

    def __init__(self, path):
        self.path, self.index = path, path.with_suffix(".idx")
        with open(self.index, "rb", opener=regular) as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                raise IncompleteError(f"{self.index}: expected a header of {HEADER.size} bytes, found {len(head)}")
            magic, version, code, num_sequences, num_edges = HEADER.unpack(head)
            if magic != MAGIC or version != 1 or code not in DTYPES:
                raise FormatError(
                    f"{self.index}: expected the index of Megatron tokens, version 1, found {head[:18]!r}"
                )
            end = HEADER.size + 12 * num_sequences + 8 * num_edges
            require_bytes(end, file.fileno(), self.index, f"{num_sequences:,} sequences")
            lengths = np.frombuffer(file.read(4 * num_sequences), "<i4")
            file.seek(8 * num_sequences, 1)  # the offsets of the sequences follow from their lengths
            edges = np.frombuffer(file.read(8 * num_edges), "<i8")
        self.dtype = DTYPES[code]
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if num_edges == 0 or edges[0] != 0 or edges[-1] != num_sequences or (np.diff(edges) < 0).any():
            raise FormatError(f"{self.index}: the edges of its documents are not those of {num_sequences:,} sequences")
        self.edges = ends[edges]
        with open(path, "rb", opener=regular) as file:
            expected = int(self.edges[-1]) * self.dtype.itemsize
            require_bytes(expected, file.fileno(), path, f"{self.edges[-1]:,} tokens")

    def blocks(self):
        """Yield runs of documents, (first, stop), of about `BLOCK_TOKENS` tokens."""
        first, count = 0, len(self.edges) - 1
        while first < count:
            stop = int(np.searchsorted(self.edges, self.edges[first] + BLOCK_TOKENS, side="right")) - 1
            yield first, (stop := min(max(stop, first + 1), count))
            first = stop


class MegatronSource(DocumentSource):
    """Documents of Megatron files, as they lie there: each may end with a boundary token of its own."""

    tokenizer = ""
    has_ids = False
    boundary_token_id = None

    def __init__(self, paths, vocab_size=0):
        self._files = [Megatron(path) for path in paths]
        self.paths = [each for file in self._files for each in (file.path, file.index)]
        small = all(file.dtype == np.uint16 for file in self._files) or 0 < vocab_size <= 2**16
        self.dtype, self.vocab_size = np.dtype("uint16" if small else "uint32"), vocab_size
        sizes = [file.path.stat().st_size for file in self._files]
        self.groups = [DocumentGroup(number, 0, size, size) for number, size in enumerate(sizes)]
        self.description = {"format": "megatron", "files": [str(path) for path in paths]}
        self.identity = {"dtype": self.dtype.name, "vocab_size": vocab_size}

    def read(self, group, choose, num_threads):
        file = self._files[group.file_number]
        tokens = np.memmap(file.path, file.dtype, "r") if file.edges[-1] else np.empty(0, file.dtype)
        for first, stop in file.blocks():
            begin, end = int(file.edges[first]), int(file.edges[stop])
            chosen, lengths = tokens[begin:end], np.diff(file.edges[first : stop + 1])
            rows = np.arange(first + 1, stop + 1, dtype=np.uint64)
            if choose is not None:
                wanted = choose(len(lengths))
                chosen = chosen[np.repeat(wanted, lengths)]
                lengths = lengths[wanted]
                rows = rows[wanted]
            yield TokenizedDocuments(chosen, lengths, str(file.path), rows, read=end * file.dtype.itemsize)


class MegatronPairs(RowsFormat):
    """Pairs of files, and folders of them."""

    def fits(self, look):
        return True

    def rows(self, found, *, vocab_size):
        return MegatronSource(files_at([found[0].look.of(each.path) for each in found], ".bin"), vocab_size)


ROW = FormatRow(
    name="megatron",
    noun="Megatron-LM files",
    suffixes=(".bin",),
    place=f"{__name__}:MegatronPairs",
    is_of_rows=True,
    options=("vocab_size",),
    holds_documents=True,
)


def plug_in():
    """Make the format known, as a program does before it imports the commands."""
    FORMATS["megatron"] = ROW
