"""Ids as text that a person can read, on any terminal and in any page; and the tokenizer for the ids of a store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from zb_hdf5.errors import ZbError
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
#: Equal tokens in a row, such as padding, that are written once.
LONG_RUN: Final = 32


def tokenizer_of(stored: str, asked: str | None, folders: Iterable[Path], where: object) -> Tokenizer | None:
    """Return the tokenizer to show the ids of a store with; None if it is not known, or not on this machine.

    Parameters
    ----------
    stored
        The description of its tokenizer that the store keeps. The tokenizer is taken if it needs no network: a file of
        the same digest, or an encoding of tiktoken's if TIKTOKEN_CACHE_DIR is set.
    asked
        The tokenizer that the user has named, as for `load_tokenizer`: it must be that of the store.
    folders
        Folders in which its file may be: a store has the name of the file, and not its folder.
    where
        The store, for messages.
    """
    if asked is not None:
        tokenizer = load_tokenizer(asked)
        require_tokenizer(stored, tokenizer, where)
        return tokenizer
    named = tokenizer_named(stored)
    kind = str(named.get("kind"))
    name = str(named.get("name"))
    if kind == ByteTokenizer.kind:
        specs = [kind]
    else:
        files = [folder / name for folder in folders if name == Path(name).name]
        specs = [f"{kind}:{file}" for file in files if os.path.isfile(file)]  # False also for any other text
        if kind == TiktokenTokenizer.kind and "TIKTOKEN_CACHE_DIR" in os.environ:
            specs.append(f"{kind}:{name}")
    for spec in specs:
        try:
            tokenizer = load_tokenizer(spec)
        except (ZbError, OSError):
            continue
        if tokenizer.digest == named.get("digest"):
            return tokenizer
    return None


def readable(tokenizer: Tokenizer | None, ids: TokenArray) -> str:
    """Return the text of any ids. Ids that the tokenizer does not have are numbers; without one, all are."""
    if tokenizer is None:
        return "".join(f"{token} " for token in ids.tolist())
    strange = np.isin(ids, [token for token in np.unique(ids).tolist() if not tokenizer.has_id(token)])
    edges = [0, *(np.flatnonzero(np.diff(strange)) + 1).tolist(), len(ids)]
    parts = []
    for start, stop in pairwise(edges):
        part = ids[start:stop]
        if strange[start:stop].any():
            parts += [f"<{token}>" for token in part.tolist()]
        else:
            parts.append(tokenizer.decode(part))
    return "".join(parts)


def readable_runs(tokenizer: Tokenizer | None, ids: TokenArray) -> Iterator[tuple[str, bool]]:
    """Yield the text of any ids; and, where one of them is repeated very often, True with the count instead."""
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.empty(0, np.int64)
    lengths = np.diff(starts, append=len(ids))
    at = 0
    for run in np.flatnonzero(lengths >= LONG_RUN).tolist():
        start = int(starts[run])
        length = int(lengths[run])
        text = readable(tokenizer, ids[start : start + 1])
        if not text.isspace():  # spaces are indentation, and not padding
            yield readable(tokenizer, ids[at:start]) + text, False
            yield f"⟨× {length:,}⟩", True
            at = start + length
    yield readable(tokenizer, ids[at:]), False
