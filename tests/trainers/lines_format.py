"""Another trainer's documents in 40 lines: `.lines` files with the ids of a document on each line, as a source."""

from functools import partial

import numpy as np

from zb_hdf5 import FormatError
from zb_hdf5.field import Field
from zb_hdf5.files.look import Look
from zb_hdf5.formats.document_source import DocumentGroup, DocumentSource, TokenizedDocuments
from zb_hdf5.formats.format import RowsFormat
from zb_hdf5.formats.format_row import FormatRow


class LinesSource(DocumentSource):
    """Documents of `.lines` files, with a field: the position of each token in its document."""

    tokenizer = ""
    boundary_token_id = None
    has_ids = False
    fields = (Field("positions", np.dtype("<u4")),)

    def __init__(self, paths, vocab_size):
        self.paths = paths
        self.dtype = np.dtype("uint16" if 0 < vocab_size <= 2**16 else "uint32")
        self.vocab_size = vocab_size
        sizes = [path.stat().st_size for path in paths]
        self.groups = [DocumentGroup(number, 0, size, size) for number, size in enumerate(sizes)]
        self.description = {"format": "lines", "files": [str(path) for path in paths]}
        self.identity = {"vocab_size": vocab_size}

    def read(self, group, choose, num_threads):
        path = self.paths[group.file_number]
        documents = [np.array(line.split(), np.int64) for line in path.read_text().splitlines()]
        wanted = np.ones(len(documents), bool) if choose is None else choose(len(documents))
        documents = [each for each, is_wanted in zip(documents, wanted, strict=True) if is_wanted]
        lengths = np.array([len(each) for each in documents], np.int64)
        positions = np.concatenate([np.empty(0, "<u4"), *map(partial(np.arange, dtype="<u4"), lengths)])
        yield TokenizedDocuments(
            np.concatenate([np.empty(0, np.int64), *documents]),
            lengths,
            str(path),
            np.flatnonzero(wanted).astype(np.uint64) + 1,
            read=group.num_bytes,
            fields={"positions": positions},
        )


class Lines(RowsFormat):
    """Files with the ids of a document on each line, and folders of them."""

    def fits(self, look):
        files = list(look.path.glob("*.lines")) if look.is_dir else [look.path]
        return all(set(file.read_text()) <= set("0123456789 \n") for file in files)

    def rows(self, found, *, vocab_size):
        paths = [each.path for each in found]
        files = [file for path in paths for file in (sorted(path.glob("*.lines")) if path.is_dir() else [path])]
        for file in files:
            if not self.fits(Look(file)):
                raise FormatError(f"{file}: expected ids on lines, found other content")
        return LinesSource(files, vocab_size)


ROW = FormatRow(
    name="lines",
    noun=".lines files of ids",
    suffixes=(".lines",),
    place=f"{__name__}:Lines",
    is_of_rows=True,
    options=("vocab_size",),
)
