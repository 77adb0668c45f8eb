"""The tokens that a field set is bound to: one split, file by file, each with its digest or that of a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5.errors import ArgumentError, ChecksumError
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.spec import DEFAULT_SPLIT, DTYPE_BY_NAME
from zb_hdf5.store.set_facts import SAMPLED, BoundFile, SetFacts

#: Places that the digest of a sample covers, evenly over the tokens of a file, and the tokens of each.
SAMPLED_PLACES: Final = 16
SAMPLED_TOKENS: Final = 4096


def split_of(corpus: Corpus) -> str:
    """Return the one split of a corpus; `ArgumentError` if it has several."""
    splits = {*corpus.file_splits}
    if len(splits) > 1 or corpus.training_split is not None:
        raise ArgumentError(
            f"{corpus.path}: has several splits, and a field set is of one: open one of them, such as "
            f"split={DEFAULT_SPLIT!r}",
            options=["split"],
        )
    return splits.pop()


def bound_files(corpus: Corpus) -> tuple[BoundFile, ...]:
    """Return the files of the tokens of a corpus, each with its digest, or that of a sample where none is stored.

    Raises
    ------
    ArgumentError
        If the corpus still grows.
    """
    if not corpus.complete:
        raise ArgumentError(f"{corpus.path}: still grows: values belong to tokens that are finished")
    found = []
    start = 0
    for file in corpus.files:
        stop = start + file.num_tokens
        found.append(BoundFile(file.name, file.num_tokens, file.sha256 or sampled_digest(corpus.tokens, start, stop)))
        start = stop
    return tuple(found)


def sampled_digest(tokens: Tokens, start: int, stop: int, dtype: np.dtype[Any] | None = None) -> str:
    """Return the digest of some tokens in a range, evenly over all of it, and of their number.

    Parameters
    ----------
    tokens, start, stop
        The tokens, and the range.
    dtype
        The dtype in which they are taken; None: their own.
    """
    dtype = dtype or tokens.dtype
    digest = hashlib.sha256(f"{stop - start}:{dtype.str}".encode())
    last = max(start, stop - SAMPLED_TOKENS)
    for place in sorted({start + (last - start) * k // (SAMPLED_PLACES - 1) for k in range(SAMPLED_PLACES)}):
        part = np.empty(min(SAMPLED_TOKENS, stop - place), tokens.dtype)
        if len(part):
            tokens.read([(place, part)])
            digest.update(part.astype(dtype, copy=False))
    return f"{SAMPLED}{digest.hexdigest()}"


def require_bound(facts: SetFacts, files: Sequence[BoundFile], where: Path, path: Path) -> tuple[BoundFile, ...]:
    """Return the files of a corpus that a field set has not seen yet, which come after the files that it has.

    Raises
    ------
    ChecksumError
        If the values belong to other tokens.
    """
    for number, expected in enumerate(facts.files):
        found = files[number] if number < len(files) else BoundFile("no file", 0, "")
        if not expected.is_same(found):
            raise ChecksumError(
                f"{where}: its values belong to other tokens than {path} has: expected {expected.name} of "
                f"{expected.num_tokens:,} tokens ({expected.digest[:16]}), found {found.name} of "
                f"{found.num_tokens:,} tokens ({found.digest[:16] or 'no digest'})"
            )
    return tuple(files[len(facts.files) :])


def rebound(facts: SetFacts, copy: Corpus) -> SetFacts:
    """Return the facts of a field set, bound to a copy of its tokens, whatever the files and the dtype of the copy are.

    The tokens of a file of the set that the copy has in a file of its own are compared by their digests; others are
    read.

    Raises
    ------
    ChecksumError
        If the copy has other tokens.
    """
    files = bound_files(copy)
    ends = [*accumulate((file.num_tokens for file in files), initial=0)]
    known = {(start, file.num_tokens): file.digest for start, file in zip(ends, files, strict=False)}
    start = 0
    for file in facts.files:
        stop = start + file.num_tokens
        is_known = known.get((start, file.num_tokens)) == file.digest
        if stop > ends[-1] or not (is_known or _has_digest(copy.tokens, start, stop, file.digest)):
            raise ChecksumError(
                f"{copy.path}: expected the tokens of the field set {facts.name}, found others from token {start:,} "
                f"on: those of {file.name}, {file.num_tokens:,} with the digest {file.digest[:16]}, are not there"
            )
        start = stop
    if start != ends[-1]:
        raise ChecksumError(
            f"{copy.path}: expected the {start:,} tokens of the field set {facts.name}, found {ends[-1]:,}"
        )
    return replace(facts, files=files)


def _has_digest(tokens: Tokens, start: int, stop: int, digest: str) -> bool:
    """Return whether some tokens have a digest in any of the dtypes that hold them: a copy may have another one."""
    others = (dtype for dtype in DTYPE_BY_NAME.values() if dtype != tokens.dtype)
    return any(_digest_as(tokens, start, stop, dtype, digest) == digest for dtype in (tokens.dtype, *others))


def _digest_as(tokens: Tokens, start: int, stop: int, dtype: np.dtype[Any], alike: str) -> str:
    """Return the digest of some tokens in a dtype, of the kind of another one; "": the dtype does not hold them."""
    if alike.startswith(SAMPLED):
        return sampled_digest(tokens, start, stop, dtype)
    found = hashlib.sha256()
    most = GROUP_BYTES // tokens.dtype.itemsize
    for first in range(start, stop, most):
        part = np.empty(min(most, stop - first), tokens.dtype)
        tokens.read([(first, part)])
        if int(part.max()) > np.iinfo(dtype).max:
            return ""
        found.update(part.astype(dtype, copy=False))
    return found.hexdigest()
