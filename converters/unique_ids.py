"""Refuses a column of ids in which one is there twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from zb_hdf5 import ConvertError
from zb_hdf5.formats.document_file import part_of
from zb_hdf5.formats.documents import DocumentTable

#: Ids that are looked at together.
BLOCK_IDS: Final = 1 << 14


def require_unique_ids(paths: Sequence[Path]) -> None:
    """Raise `ConvertError` if two documents of some tables have one id.

    Takes some 32 bytes of memory for each document.
    """
    parts, first = [], 0
    for path in paths:
        part = part_of(path)
        parts.append(part.changed(path=str(path), first_document=first))
        first += part.document_count
    table = DocumentTable("", parts)
    try:
        digests = np.concatenate([_digests(table, place) for place in range(len(parts))])
        order = digests.argsort(kind="stable")
        for place in np.flatnonzero(np.diff(digests[order]) == 0).tolist():
            one, other = (table.document(int(number)) for number in order[place : place + 2])
            if one.id == other.id:
                raise ConvertError(
                    f"{other.source}: row {other.row:,}: the id {other.id!r} was there before, in {one.source}, row "
                    f"{one.row:,}: name a column whose values differ, or leave out --id-column"
                )
    finally:
        table.close()


def _digests(table: DocumentTable, place: int) -> np.ndarray:
    """Return 64 bits of the digest of each id of one table: equal ones are then compared themselves."""
    file, count = table.file(place), table.parts[place].document_count
    blocks = ((start, min(start + BLOCK_IDS, count)) for start in range(0, count, BLOCK_IDS))
    return np.frombuffer(b"".join(_digests_of(file.rows(*block).ids or ()) for block in blocks), "<u8")


def _digests_of(ids: Iterable[bytes]) -> bytes:
    return b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in ids)
