"""`made_up_corpus`: tokens that are computed from their positions, to measure a training loop without storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, require_positive, whole_number
from zb_hdf5.files.pages import READY_PAGES
from zb_hdf5.files.tokens import TokenRun, Tokens, Wait
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.fingerprint import Fingerprint, Known
from zb_hdf5.formats.windows import Windows
from zb_hdf5.loaders.order import whole_seed
from zb_hdf5.loaders.splitmix64 import MASK64, Words, mix, splitmix64
from zb_hdf5.spec import DTYPE_BY_NAME, StoreMeta, TokenArray
from zb_hdf5.store.opening import open_for_loader

#: Stands where a corpus of files has a path: in messages, and in the `repr` of a loader.
NAME: Final = "made-up corpus"
#: Tokens that are computed at once: their words stay in the cache of a core.
TOKENS_AT_ONCE: Final = 1 << 14
#: The largest vocabulary: a word of 32 bits chooses an id of it.
MOST_IDS: Final = 2**32


class MadeUpTokens(Tokens):
    """Tokens that are computed: the one at a position follows from the position and a seed. See `Tokens`.

    Parameters
    ----------
    num_tokens, vocab_size
        Ids are 0 to `vocab_size - 1`, each as likely as any other.
    seed
        Another one gives other tokens.
    dtype
        The dtype in which a store would keep them.
    """

    pages = READY_PAGES

    def __init__(self, num_tokens: int, vocab_size: int, seed: int, dtype: np.dtype[Any]) -> None:
        self.num_tokens = num_tokens
        self.dtype = dtype
        self.unit = max(1, num_tokens)
        self.name = NAME
        self.access = "computed"
        self.wait = Wait.LOCAL
        self.identity = ()
        self._vocab_size = np.uint64(vocab_size)
        self._key = np.uint64(splitmix64(seed & MASK64))

    def read(self, runs: Iterable[TokenRun]) -> None:
        for start, out in runs:
            for first in range(0, len(out), TOKENS_AT_ONCE):
                part = out[first : first + TOKENS_AT_ONCE]
                self._compute(np.arange(start + first, start + first + len(part), dtype=np.uint64), part)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        rows = max(1, TOKENS_AT_ONCE // out.shape[1])
        for first in range(0, len(out), rows):
            some = starts[first : first + rows].astype(np.uint64)
            positions: Words = np.add.outer(some, np.arange(out.shape[1], dtype=np.uint64))
            self._compute(positions, out[first : first + rows])

    def _compute(self, positions: Words, out: TokenArray) -> None:
        words = positions + self._key
        mix(words, positions)
        words >>= np.uint64(32)
        words *= self._vocab_size
        words >>= np.uint64(32)
        out[...] = words

    def close(self) -> None:
        """Do nothing: no file is open."""


class MadeUpCorpus(Corpus):
    """Made-up tokens, in batches. See `Corpus`.

    Parameters
    ----------
    tokens
        The tokens.
    windows
        The records and batches.
    vocab_size, seed
        As for `made_up_corpus`.
    """

    backend = NAME

    def __init__(self, tokens: MadeUpTokens, windows: Windows, vocab_size: int, seed: int) -> None:
        meta = StoreMeta(windows.size, windows.length, tokens.dtype, vocab_size=vocab_size)
        super().__init__(Path(NAME), meta, tokens)
        self.windows: Windows = windows
        self._seed = seed

    @property
    def tokens_only(self) -> str:
        return "made-up tokens have neither fields nor documents"

    @property
    def known_as(self) -> Fingerprint:
        return Fingerprint(Known.MADE_UP, self._content, self._content)

    def _content(self) -> str:
        return f"made-up:{self.num_tokens}:{self.meta.vocab_size}:{self._seed}"

    def meta_of(self, windows: Windows, num_batches: int) -> StoreMeta:
        return replace(self.meta, batch_size=windows.size, seq_len=windows.length)


def made_up_corpus(
    num_tokens: int | None = None,
    vocab_size: int | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    *,
    overlap: int = 0,
    seed: int = 0,
    like: str | os.PathLike[str] | Corpus | Batches | None = None,
) -> Batches:
    """Return batches of tokens that are computed from their positions: no file is read, and none is written.

    Give it to a `Loader` in place of a path. A training loop that is as fast with it as with the store does not wait
    for storage; one that is slow with it has another reason.

    Parameters
    ----------
    num_tokens
        Tokens of the corpus.
    vocab_size
        Ids are 0 to `vocab_size - 1`, each as likely as any other: a loss stays near `log(vocab_size)`.
    batch_size, seq_len
        Shape of the batches. Records that fill no batch follow the last one, as in a store.
    overlap
        Tokens that each record shares with the next, as for `open_reader`: 1 for a loop with `targets` that a token
        stream is to feed.
    seed
        Another one gives other tokens.
    like
        A path for `Loader`, a corpus, or batches: what is not given is as there. No token of it is read.

    Returns
    -------
    Batches
        Each token follows from its position and the seed alone: it is the same on every rank, in every order and after
        a resume. It has neither documents nor fields.

    Raises
    ------
    ArgumentError
        If a value is missing or not possible.

    Examples
    --------
    >>> corpus = made_up_corpus(10**12, vocab_size=128_256, batch_size=8, seq_len=4096)
    >>> loader = Loader(corpus, seed=42)  # doctest: +SKIP
    >>> rehearsal = Loader(made_up_corpus(like="data/train"), seed=42)  # doctest: +SKIP
    """
    given = {"num_tokens": num_tokens, "vocab_size": vocab_size, "batch_size": batch_size, "seq_len": seq_len}
    require_positive(**given)
    if whole_number("overlap", overlap) < 0:
        raise ArgumentError(f"overlap must be at least 0, found {overlap}")
    dtype = None
    if like is not None:
        facts, dtype = _facts_of(like, batch_size, seq_len)
        overlap = overlap or facts.pop("overlap")
        given = {name: facts[name] if value is None else value for name, value in given.items()}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ArgumentError(
            f"made_up_corpus needs {', '.join(missing)}; pass them, or like= with a store to take after"
        )
    return _made_up(**{name: int(value or 0) for name, value in given.items()}, overlap=overlap, seed=seed, dtype=dtype)


def _made_up(
    num_tokens: int,
    vocab_size: int,
    batch_size: int,
    seq_len: int,
    overlap: int,
    seed: int,
    dtype: np.dtype[Any] | None,
) -> Batches:
    """Return the batches; a dtype that does not hold the ids is left aside."""
    if vocab_size > MOST_IDS:
        raise ArgumentError(f"vocab_size must be at most 2**32, found {vocab_size:,}")
    if dtype is None or vocab_size - 1 > np.iinfo(dtype).max:
        dtype = DTYPE_BY_NAME["uint16" if vocab_size <= 2**16 else "uint32"]
    tokens = MadeUpTokens(num_tokens, vocab_size, whole_seed(seed), dtype)
    return MadeUpCorpus(tokens, Windows.of(batch_size, seq_len, overlap), vocab_size, seed).batches()


def _facts_of(
    like: str | os.PathLike[str] | Corpus | Batches, batch_size: int | None, seq_len: int | None
) -> tuple[dict[str, int], np.dtype[Any]]:
    """Return tokens, vocabulary and shape of a store, or of a stream that is cut as asked for, and its dtype."""
    batches, is_ours = open_for_loader(like, batch_size, seq_len)
    with batches if is_ours else nullcontext():
        largest = batches.corpus.max_token
        if largest is None:
            largest = int(np.iinfo(batches.dtype).max)
        facts = {
            "num_tokens": batches.corpus.num_tokens,
            "vocab_size": batches.meta.vocab_size or largest + 1,
            "batch_size": batches.batch_size,
            "seq_len": batches.stride,
            "overlap": batches.overlap,
        }
        return facts, batches.dtype
