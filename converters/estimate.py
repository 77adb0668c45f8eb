"""The number of tokens of documents, and the time of a conversion, for a dry run: counted, or by a sample."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Final, NamedTuple

from zb_hdf5.converters.batch_source import BatchSource, read_groups
from zb_hdf5.converters.rehearsal import Rehearsal
from zb_hdf5.formats.document_source import DocumentGroup, DocumentSource
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import NO_CODEC

#: Groups whose first bytes are looked at.
SAMPLE_GROUPS: Final = 4
#: Bytes of each of them, about.
SAMPLE_GROUP_BYTES: Final = 8 << 20


class Estimate(NamedTuple):
    """The tokens of documents, whether all of them were counted, and about how long their conversion takes."""

    num_tokens: int
    is_exact: bool
    seconds: float


def estimate_of(
    source: DocumentSource, num_threads: int, folder: Path, *, workers: int, is_staged: bool = False
) -> Estimate:
    """Return the number of tokens of a source, and the time of its conversion, each by a sample where it is not known.

    Parameters
    ----------
    source
        The documents.
    num_threads
        The threads of a process that reads them.
    folder
        The place of the result.
    workers
        The processes that write it.
    is_staged
        The tokens are written twice: the documents become rows.
    """
    with Rehearsal(folder) as rehearsal:
        if source.num_tokens is None:
            num_tokens, is_exact, share = _sampled(source, num_threads, rehearsal)
        else:
            num_tokens, is_exact = source.num_tokens, True
            share = _read_some(source, num_threads, rehearsal) / max(1, num_tokens)
    more_bytes = num_tokens * source.dtype.itemsize if is_staged else 0
    return Estimate(num_tokens, is_exact, rehearsal.seconds_of(share, more_bytes, workers))


def seconds_of_batches(source: BatchSource, codec: str, folder: Path, *, workers: int, temp_bytes: int) -> float:
    """Return about how long a conversion of batches takes, by a sample.

    Parameters
    ----------
    source
        The batches.
    codec
        The codec of the result.
    folder
        The place of the result.
    workers
        The processes that write it.
    temp_bytes
        The bytes of the first of two passes, which reads the records in their own order; 0: there is one pass.
    """
    if temp_bytes:
        source = copy(source)
        source.order = None
    done = 0
    with Rehearsal(folder, codec) as rehearsal:
        for group in read_groups(source, 0, source.num_batches):
            rehearsal.write(group.tokens)
            done += len(group.tokens)
            if rehearsal.is_over:
                break
    packing = 1 if codec != NO_CODEC else workers  # one process packs on all cores
    return rehearsal.seconds_of(done / max(1, source.num_batches), temp_bytes, packing)


def _read_some(source: DocumentSource, num_threads: int, rehearsal: Rehearsal) -> int:
    """Read documents for as long as the rehearsal takes, and return the number of their tokens."""
    tokens = 0
    for group in source.groups:
        for encoded in source.read(group, None, num_threads):
            deliver_signals()
            rehearsal.write(encoded.tokens)
            tokens += len(encoded.tokens)
            if rehearsal.is_over:
                return tokens
    return tokens


def _sampled(source: DocumentSource, num_threads: int, rehearsal: Rehearsal) -> tuple[int, bool, float]:
    """Return the number of tokens by some groups of a source, whether it is exact, and the share that was read."""
    groups = source.groups[:: -(-len(source.groups) // SAMPLE_GROUPS)]
    found = [_sample(source, group, num_threads, rehearsal) for group in groups]
    tokens = sum(count for count, _ in found)
    if len(groups) == len(source.groups) and all(is_whole for _, is_whole in found):
        return tokens, True, 1.0
    read = sum(
        group.num_bytes if is_whole else min(group.num_bytes, SAMPLE_GROUP_BYTES)
        for group, (_, is_whole) in zip(groups, found, strict=True)
    )
    total = sum(group.num_bytes for group in source.groups)
    return round(tokens * total / max(1, read)), False, read / max(1, total)


def _sample(source: DocumentSource, group: DocumentGroup, num_threads: int, rehearsal: Rehearsal) -> tuple[int, bool]:
    """Return the tokens of about `SAMPLE_GROUP_BYTES` of a group, and whether the whole group was read."""
    tokens = 0
    for encoded in source.read(group, None, num_threads):
        deliver_signals()
        rehearsal.write(encoded.tokens)
        tokens += len(encoded.tokens)
        if encoded.read >= SAMPLE_GROUP_BYTES < group.num_bytes:
            return round(tokens * SAMPLE_GROUP_BYTES / encoded.read), False
    return tokens, True
