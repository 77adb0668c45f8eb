"""The number of tokens of documents, for a dry run: counted, or estimated from a sample of them."""

from __future__ import annotations

from typing import Final, NamedTuple

from zb_hdf5.formats.document_source import DocumentGroup, DocumentSource
from zb_hdf5.signals import deliver_signals

#: Groups of which the first bytes are looked at.
SAMPLE_GROUPS: Final = 4
#: Bytes of each of them, about.
SAMPLE_GROUP_BYTES: Final = 8 << 20


class Estimate(NamedTuple):
    """The tokens of documents, and whether all of them were counted."""

    num_tokens: int
    is_exact: bool


def estimate_of(source: DocumentSource, num_threads: int) -> Estimate:
    """Return the number of tokens of a source; of one that does not have it, in proportion to a sample."""
    if source.num_tokens is not None:
        return Estimate(source.num_tokens, is_exact=True)
    groups = source.groups[:: -(-len(source.groups) // SAMPLE_GROUPS)]
    found = [_sample(source, group, num_threads) for group in groups]
    tokens = sum(count for count, _ in found)
    if len(groups) == len(source.groups) and all(is_whole for _, is_whole in found):
        return Estimate(tokens, is_exact=True)
    read = sum(
        group.num_bytes if is_whole else min(group.num_bytes, SAMPLE_GROUP_BYTES)
        for group, (_, is_whole) in zip(groups, found, strict=True)
    )
    total = sum(group.num_bytes for group in source.groups)
    return Estimate(round(tokens * total / max(1, read)), is_exact=False)


def _sample(source: DocumentSource, group: DocumentGroup, num_threads: int) -> tuple[int, bool]:
    """Return the tokens of about `SAMPLE_GROUP_BYTES` of a group, and whether these are all of it."""
    tokens = 0
    for encoded in source.read(group, None, num_threads):
        deliver_signals()
        tokens += len(encoded.tokens)
        if encoded.read >= SAMPLE_GROUP_BYTES < group.num_bytes:
            return round(tokens * SAMPLE_GROUP_BYTES / encoded.read), False
    return tokens, True
