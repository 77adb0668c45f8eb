"""The table of files that hold no index: of flat formats, and of HDF5 files of another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zb_hdf5.files.checked import crc32_of
from zb_hdf5.formats.flat_digest import FlatDigest
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.spec import DEFAULT_CHUNK_TOKENS, NO_SHA256, NOT_COUNTED, NOT_KNOWN
from zb_hdf5.store.shard_table import ShardTable


def flat_table(
    backend: str,
    names: list[str],
    found: Sequence[FlatFacts],
    splits: list[str],
    digests: Mapping[str, FlatDigest],
) -> ShardTable:
    """Return the table of flat files, by their names: an entry for each would take as long as its header."""
    counts = np.array([each.num_tokens for each in found], np.int64)
    return ShardTable.of_files(
        names,
        [field.name for field in found[0].fields],
        backend=backend,
        num_bytes=0,
        num_batches=-(-counts // DEFAULT_CHUNK_TOKENS),
        token_count=counts,
        sha256=NO_SHA256,
        crc32=[crc32_of(digests[each].rows()) for each in names] if digests else NOT_KNOWN,
        document_count=[_documents_of(each) for each in found],
        split=splits,
        complete=True,
    )


def _documents_of(found: FlatFacts) -> int:
    """Return the number of documents of a file; `NOT_KNOWN`, or `NOT_COUNTED` where each would be read for it."""
    if found.num_documents is not None:
        return found.num_documents
    return NOT_COUNTED if found.column is not None and found.column.told_by else NOT_KNOWN
