"""The token files of OLMo and dolma: ids without a header, named `.npy`, with a `.csv.gz` of their documents beside.

A row of the latter has the first id of a document, the end of its ids, its id, its source file and its line there;
the first two are enough, as OLMo-core writes them. A `.npy` file that numpy has written is none of these. Source:
`dolma.tokenizer.memmap_writer` and `olmo_core.data.utils`.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.errors import FormatError, IncompleteError
from zb_hdf5.files.identity import Identity, require_identity, require_unreplaced
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import regular
from zb_hdf5.formats.document_writer import FlatWriter
from zb_hdf5.formats.flat import LOSS_FIELD, FlatFormat, require_mask
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.spec import NO_BOUNDARY, NOT_COUNTED, StoreMeta

OLMO_DOCUMENTS_SUFFIX: Final = ".csv.gz"
#: The words of ids in the name of a file, and the words of a loss mask in their place.
ID_WORDS: Final = re.compile("token_ids|input_ids")
MASK_WORDS: Final = ("labels_mask", "label_mask", "loss_mask")
#: Characters of a line of documents at most: a longer one is not a line.
MAX_LINE: Final = 1 << 20
#: The level of compression of the documents.
GZIP_LEVEL: Final = 6
#: The window of zlib that makes it write a gzip file, whose header has no time.
GZIP_WINDOW: Final = 31


class OlmoFiles(FlatFormat):
    """Headerless `.npy` files of OLMo and dolma, with the documents and the loss mask of the files beside each one."""

    sign: ClassVar = ""
    documents_suffix: ClassVar = OLMO_DOCUMENTS_SUFFIX

    def fits(self, look: Look) -> bool:
        return self.read_as.lacks_header

    def facts(self, look: Look) -> FlatFacts:
        path = look.path
        if not self.read_as.lacks_header:
            raise FormatError(f"{path}: expected the dtype of ids without a header, found none")
        found = self.facts_without_header(look)
        mask = _mask_of(path)
        if mask is not None:
            require_mask(mask, found.num_tokens)
            found = found._replace(fields=(LOSS_FIELD,))
        documents = look.of(_documents_of(path))
        try:
            return found._replace(num_documents=NOT_COUNTED, documents_identity=documents.identity)
        except FileNotFoundError:
            return found

    def sidecars(self, path: Path) -> list[Path]:
        documents = _documents_of(path)
        return [*([documents] if documents.exists() else []), *map(Path, self.field_files([os.fspath(path)]))]

    def field_files(self, ids: Sequence[str]) -> list[str]:
        return [os.fspath(mask) for mask in map(_mask_of, map(Path, ids)) if mask is not None]

    def file_of_field(self, path: Path, name: str) -> Path:
        mask = _mask_of(path)
        if mask is None:
            raise FormatError(f"{path}: was replaced: expected its labels mask beside it, found none; open it again")
        return mask

    def num_documents(self, found: FlatFacts) -> int:
        if found.num_documents is None:
            return super().num_documents(found)
        documents = _documents_of(found.path)
        return _count(documents, require_unreplaced(documents, found.documents_identity), found.num_tokens)

    def document_offsets(self, found: FlatFacts) -> npt.NDArray[np.uint64]:
        if found.num_documents is None:
            return super().document_offsets(found)
        ends = _ends(_documents_of(found.path), found.documents_identity, found.num_tokens)
        return np.fromiter(chain([0], ends), np.uint64)


def _mask_of(path: Path) -> Path | None:
    """Return the file of the loss mask beside a file that is named as ids are; None if there is none.

    OLMo-core names `labels_mask_part_0000.npy` beside `token_ids_part_0000.npy`: a bool for each id, without a header.
    """
    return next((mask for mask in _masks_of(path) if mask.is_file()), None)


def _masks_of(path: Path) -> list[Path]:
    """Return the files that may have the loss mask of a file, there or not."""
    if ID_WORDS.search(path.name) is None:
        return []
    return [path.with_name(ID_WORDS.sub(word, path.name, count=1)) for word in MASK_WORDS]


def _documents_of(path: Path) -> Path:
    return path.with_suffix(OLMO_DOCUMENTS_SUFFIX)


@lru_cache(maxsize=4096)
def _count(documents: Path, known: Identity, num_tokens: int) -> int:
    """Return the number of documents, once for each file: all rows are read for it, and checked."""
    return sum(1 for _ in _ends(documents, known, num_tokens))


def _ends(documents: Path, known: Identity | None, num_tokens: int) -> Iterator[int]:
    """Yield the end of each document. Raises as `FlatFormat.document_offsets` does."""
    end = 0
    number = 0
    for number, (start, stop) in enumerate(_rows(documents, known), 1):
        if start != end or not start <= stop <= num_tokens:
            raise FormatError(
                f"{documents}: expected documents that follow each other up to {num_tokens:,}, found {start:,} to "
                f"{stop:,} after {end:,} in row {number:,}"
            )
        if number > max(num_tokens, 1):
            raise FormatError(f"{documents}: expected at most one document for each of {num_tokens:,} ids, found more")
        end = stop
        yield end
    if end != num_tokens:
        raise FormatError(
            f"{documents}: expected documents of all {num_tokens:,} ids of the file, found {number:,} of {end:,}; "
            "restore it, or remove it to read the ids without documents"
        )


def _rows(documents: Path, known: Identity | None) -> Iterator[tuple[int, int]]:
    """Yield the first two values of each row; `FormatError` unless the file is the known one."""
    number = 0
    try:
        with open(documents, "rb", opener=regular) as file:
            require_identity(file.fileno(), known, documents)
            with gzip.open(file, "rt", encoding="utf-8", errors="surrogateescape", newline="") as lines:
                for row in csv.reader(iter(lambda: lines.readline(MAX_LINE), "")):
                    number += 1
                    yield int(row[0]), int(row[1])
    except FormatError:  # it is not a file
        raise
    except EOFError as error:
        raise IncompleteError(f"{documents}: expected a whole gzip file, found one that was cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{documents}: expected a gzip file of documents, found a damaged one: {error}") from error
    except csv.Error as error:
        raise FormatError(f"{documents}: expected rows of documents, found {error} after row {number:,}") from error
    except (ValueError, IndexError) as error:
        raise FormatError(
            f"{documents}: expected the first id and the end of each document, found other values in row {number:,}"
        ) from error


class OlmoWriter(FlatWriter):
    """Writes headerless ids named `.npy`, and the `.csv.gz` of their documents if a boundary token ends each."""

    backend: ClassVar = "olmo"
    suffix: ClassVar = ".npy"

    @classmethod
    def files(cls, path: Path, meta: StoreMeta) -> list[Path]:
        return [path] if meta.boundary_token_id == NO_BOUNDARY else [path, _documents_of(path)]

    @classmethod
    def sidecars(cls, path: Path) -> list[Path]:
        return [_documents_of(path), *_masks_of(path)]

    def _begin(self) -> None:
        self._packer = None
        if self._others:  # no name and no time: equal documents give equal bytes
            self._packer = zlib.compressobj(level=GZIP_LEVEL, wbits=GZIP_WINDOW)

    def _take_documents(
        self,
        lengths: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]],
        documents: DocumentRows,
    ) -> None:
        if self._packer is None or not len(lengths):
            return
        count = len(lengths)
        ends = (self.token_count - int(lengths.sum()) + np.cumsum(lengths)).tolist()
        starts = [ends[0] - int(lengths[0]), *ends[:-1]]
        ids = [b""] * count if documents.ids is None else documents.ids
        places = range(1, count + 1) if documents.rows is None else documents.rows.tolist()
        source = documents.names[0] if documents.names else ""
        text = io.StringIO()
        texts = (each.decode("utf-8") for each in ids)
        csv.writer(text).writerows(zip(starts, ends, texts, repeat(source), places, strict=False))
        self._others[0].append(self._packer.compress(text.getvalue().encode("utf-8", "surrogateescape")))

    def _complete(self) -> None:
        if self._packer is not None:
            self._others[0].append(self._packer.flush())
