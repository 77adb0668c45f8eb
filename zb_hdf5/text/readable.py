"""Stored ids as text that a person can look at, on any terminal and in any page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5.errors import ArgumentError, ZbError
from zb_hdf5.spec import TokenArray
from zb_hdf5.text.tokenizers import (
    ByteTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
    require_tokenizer,
    tokenizer_named,
)

NEWLINE: Final = "⏎"
#: Equal tokens in a row, such as those of padding, that are written once.
LONG_RUN: Final = 32


def tokenizer_of(stored: str, asked: str | None, folders: Iterable[Path], where: object) -> Tokenizer | None:
    """Return the tokenizer to show the ids of a store with; None if it is not known, or not on this machine."""
    # the one asked for, else the one that is stored, if it can be had without a network: a file of the same digest in
    # one of `folders`, or an encoding of tiktoken's if TIKTOKEN_CACHE_DIR is set
    if asked is not None:
        tokenizer = load_tokenizer(asked)
        require_tokenizer(stored, tokenizer, where)
        return tokenizer
    named = tokenizer_named(stored)
    for spec in _places(str(named.get("kind")), str(named.get("name")), folders):
        try:
            tokenizer = load_tokenizer(spec)
        except (ZbError, OSError):
            continue
        if tokenizer.digest == named.get("digest"):
            return tokenizer
    return None


def _places(kind: str, name: str, folders: Iterable[Path]) -> Iterable[str]:
    """Return the specifications to try: a store has the name of a file and not its folder."""
    if kind == ByteTokenizer.kind:
        return [kind]
    files = [folder / name for folder in folders if name == Path(name).name]
    found = [f"{kind}:{file}" for file in files if os.path.isfile(file)]  # False also for what is no name of a file
    if kind == TiktokenTokenizer.kind and "TIKTOKEN_CACHE_DIR" in os.environ:
        found.append(f"{kind}:{name}")
    return found


def readable(tokenizer: Tokenizer | None, ids: TokenArray) -> str:
    """Return the text of any ids: those that the tokenizer does not have, or all without one, as numbers."""
    if tokenizer is None:
        return "".join(f"{token} " for token in ids.tolist())
    try:
        return tokenizer.decode(ids)
    except ArgumentError:
        pass
    distinct = np.unique(ids)
    strange = np.isin(ids, distinct[[not _has(tokenizer, token) for token in distinct]])
    cuts = np.flatnonzero(np.diff(strange, prepend=not strange[0])).tolist()
    return "".join(
        "".join(f"<{token}>" for token in ids[a:b].tolist()) if strange[a] else tokenizer.decode(ids[a:b])
        for a, b in zip(cuts, [*cuts[1:], len(ids)], strict=True)
    )


def readable_runs(tokenizer: Tokenizer | None, ids: TokenArray) -> Iterator[tuple[str, bool]]:
    """Yield the text of any ids; and, where one of them is repeated very often, True with the count instead."""
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.empty(0, np.int64)
    lengths = np.diff(starts, append=len(ids))
    at = 0
    for run in np.flatnonzero(lengths >= LONG_RUN).tolist():
        start, length = int(starts[run]), int(lengths[run])
        if not (text := readable(tokenizer, ids[start : start + 1])).isspace():  # indentation is no padding
            yield readable(tokenizer, ids[at:start]) + text, False
            yield f"⟨× {length:,}⟩", True
            at = start + length
    yield readable(tokenizer, ids[at:]), False


def _has(tokenizer: Tokenizer, token: Any) -> bool:
    try:
        tokenizer.decode([token])
    except ArgumentError:
        return False
    return True
