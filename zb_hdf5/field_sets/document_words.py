"""A field set of documents that has a code for the value of one key of their metadata, made once for all ranks.

To parse the metadata of 100 M documents takes minutes, and each rank would do it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.errors import ArgumentError
from zb_hdf5.field import CODE, UNITS, Field
from zb_hdf5.field_sets.asked_set import open_field_set
from zb_hdf5.field_sets.field_set import FieldSet
from zb_hdf5.formats.corpus import Corpus

#: Documents whose metadata are read at once.
READ_AT_ONCE: Final = 1 << 14
#: The code of a document that has no such key; codes are below it.
NO_WORD: Final = 65_535


def make_words(
    corpus: Corpus,
    name: str,
    key: str,
    *,
    path: Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Make a set with a code for each document: the place of the value of a key among all of its values.

    Parameters
    ----------
    corpus
        The documents.
    name
        The name of the set.
    key
        The key of the metadata. Values other than text are taken as JSON has them.
    path
        As for `open_field_set`.
    progress
        Called with the number of documents that were read.

    Returns
    -------
    list[str]
        The values, the most frequent first.

    Raises
    ------
    ArgumentError
        If no document has the key, or it has more values than codes.
    BackendError
        If no documents are stored.
    """
    words: dict[str, int] = {}
    codes = array("I")
    for texts in _metadata(corpus.require_documents()):
        for text in texts:
            word = _word_of(text, key)
            codes.append(NO_WORD if word is None else words.setdefault(word, len(words)))
        if len(words) >= NO_WORD:
            raise ArgumentError(f"{corpus.path}: {key!r} has more than {NO_WORD:,} values: it names no group")
        progress(len(texts))
    if not words:
        raise ArgumentError(f"{corpus.path}: no document has {key!r} among its metadata")
    found = np.frombuffer(codes, np.uint32)
    counts = np.bincount(found[found != NO_WORD], minlength=len(words))
    order = np.argsort(-counts, kind="stable")
    places = np.full(NO_WORD + 1, NO_WORD, "<u2")
    places[order] = np.arange(len(order))
    ordered = np.array(list(words), dtype=object)[order].tolist()
    with open_field_set(corpus, name, [field_of_codes()], path=path, words=ordered, note=f"values of {key!r}") as made:
        _write(made, places[found])
        made.finish()
    return list(ordered)


def field_of_codes() -> Field:
    """Return the field of a set of codes."""
    return Field(CODE, np.dtype("<u2"), unit=UNITS[2], fill=NO_WORD)


def _write(made: FieldSet, codes: npt.NDArray[np.uint16]) -> None:
    """Write the codes of the documents that have none yet: of a run that was ended, the next one writes the rest."""
    for documents in made.missing_records(READ_AT_ONCE, job=0, num_jobs=1, quiet=True):
        made.write(documents, **{CODE: codes[documents]})


def _metadata(table: DocumentTable) -> Iterator[list[bytes]]:
    """Yield the texts of the metadata of all documents, some at a time."""
    for file in table.each_file():
        for start in range(0, file.count, READ_AT_ONCE):
            stop = min(start + READ_AT_ONCE, file.count)
            rows = file.rows(start, stop, spans=False).metadata
            yield [b""] * (stop - start) if rows is None else list(rows)


def _word_of(text: bytes, key: str) -> str | None:
    """Return the value of a key in the JSON of metadata, as text; None: it has none."""
    value = json.loads(text).get(key) if text else None
    return value if value is None or isinstance(value, str) else json.dumps(value, sort_keys=True)
