"""The tokenized-corpus lesson's own names: documents to shards of token streams, and random windows of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import require_choice
from zb_hdf5.converters import to_streams
from zb_hdf5.converters.engines import open_engine
from zb_hdf5.converters.routing import Recipe
from zb_hdf5.converters.run import WorkOptions
from zb_hdf5.errors import ArgumentError, StateError
from zb_hdf5.files.publishing import refuse_existing, scratch_directory
from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter
from zb_hdf5.loaders.order import GlobalOrder
from zb_hdf5.loaders.states import (
    MAX_COUNT,
    STATE_VERSION,
    require_count,
    require_epoch,
    require_fields,
    require_kind,
    require_same,
    shown,
)
from zb_hdf5.store import stream_documents
from zb_hdf5.text.corpus import DocumentFile, open_documents
from zb_hdf5.text.tokenizers import load_tokenizer

__all__ = ["HDF5ShardWriter", "MmapTokenStore", "ShardedTokenizationPipeline", "SlidingWindowDataloader"]

WINDOW_ORDERS: Final = ("epoch", "random")
#: A batch of windows: inputs, and targets.
Windows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class MmapTokenStore(stream_documents.MmapTokenStore):
    """One long sequence of tokens over the files of a store, which may grow.

    Parameters
    ----------
    path, split, access, verify
        As for `open_reader`: a stream file, a folder of them with its `shards.json`, or 1-D `.npy` files.
    """

    def refresh(self) -> int:
        """See what was committed, or added to `shards.json`, since the store was opened. Return `num_tokens`."""
        fresh = type(self)(self.path, split=self._split, access=self._access, verify=self._verify)
        self.close()
        self.__dict__.update(fresh.__dict__)
        return self.num_tokens


class ShardedTokenizationPipeline:
    """Tokenizes documents into a store of token streams: shards, and the `shards.json` that names them.

    Parameters
    ----------
    documents
        Texts, or files that `open_documents` has opened. Text number k goes to shard k % num_shards; of files
        consecutive parts go to each shard.
    tokenizer
        As for `load_tokenizer`.
    num_shards
        How many files to write; None: one, or one per file of documents.
    boundary_token
        The special token behind each document. None: that of the tokenizer.

    Examples
    --------
    >>> ShardedTokenizationPipeline(["a text", "another"], num_shards=2).run("corpus")  # doctest: +SKIP
    """

    def __init__(
        self,
        documents: Iterable[str] | Iterable[DocumentFile],
        tokenizer: str = "byte",
        *,
        num_shards: int | None = None,
        boundary_token: str | None = None,
    ) -> None:
        if isinstance(documents, str):
            raise ArgumentError("documents: expected an iterable of texts, found one text; pass [text]")
        if num_shards is not None and num_shards < 1:
            raise ArgumentError(f"num_shards must be at least 1, found {num_shards}")
        known = load_tokenizer(tokenizer)
        boundary = known.boundary_token_id if boundary_token is None else known.special_token_id(boundary_token)
        self._documents, self._num_shards = documents, num_shards
        self._recipe = Recipe(tokenizer, boundary)

    def run(
        self, destination: str | os.PathLike[str], *, workers: int = 1, overwrite: bool = False
    ) -> to_streams.StreamReport:
        """Write the store. Texts lie in `<destination>.texts.partial/` meanwhile.

        Raises
        ------
        ExistsError
            If the destination exists.
        ConvertError
            If there are no documents, or fewer than shards.
        """
        destination = Path(destination)
        if not overwrite:
            refuse_existing(destination)
        documents: Iterator[Any] = iter(self._documents)
        first = next(documents, None)
        documents = chain([] if first is None else [first], documents)
        if isinstance(first, DocumentFile):
            return self._run(list(documents), first.path.suffix.removeprefix("."), destination, workers, overwrite)
        with scratch_directory(destination.with_name(destination.name + ".texts")) as folder:
            paths = _spool(documents, folder, self._num_shards or 1)
            return self._run(open_documents(paths, "jsonl"), "texts", destination, workers, overwrite)

    def _run(
        self, files: list[DocumentFile], kind: str, destination: Path, workers: int, overwrite: bool
    ) -> to_streams.StreamReport:
        pipeline = to_streams.ShardedTokenizationPipeline(files, kind, self._recipe, num_shards=self._num_shards)
        with open_engine("local", workers) as engine:
            assert engine is not None  # only an MPI rank has none
            return pipeline.run(destination, WorkOptions(engine, overwrite))


def _spool(texts: Iterator[str], folder: Path, num_files: int) -> list[Path]:
    """Write texts to JSON lines, one file after the other in turn."""
    paths = [folder / f"texts-{number:05}.jsonl" for number in range(num_files)]
    files = [path.open("w", encoding="utf-8") for path in paths]
    try:
        for number, (file, text) in enumerate(zip(cycle(files), texts, strict=False)):
            if not isinstance(text, str):
                raise ArgumentError(f"document {number:,}: expected a text, found {shown(text)}")
            file.write(json.dumps({"text": text}) + "\n")
    finally:
        for file in files:
            file.close()
    return paths


class SlidingWindowDataloader:
    """Yields `(input_ids, target_ids)`: windows of a stream, and the same shifted by one, as NumPy arrays.

    Parameters
    ----------
    store
        The tokens.
    window_size
        Tokens of each input; a window reads one more.
    batch_size
        Windows per yield.
    order
        "epoch": every window that begins at a multiple of `window_size`, each exactly once, in a uniform order; the
        last windows that do not fill a batch are left out. "random": windows that begin anywhere, for ever.
    seed, epoch
        What the order depends on.

    Notes
    -----
    An iteration in the order "epoch" begins anew, except the first one after `load_state_dict`; "random" goes on.
    For ranks, tensors and prefetch pass the stream to `Loader` with `targets=True`.

    Examples
    --------
    >>> store = MmapTokenStore("corpus")                                            # doctest: +SKIP
    >>> for input_ids, target_ids in SlidingWindowDataloader(store, 2048, 8):       # doctest: +SKIP
    ...     ...                                          # int64 arrays of shape (8, 2048)
    """

    def __init__(
        self,
        store: stream_documents.MmapTokenStore,
        window_size: int,
        batch_size: int,
        *,
        order: str = "epoch",
        seed: int = 42,
        epoch: int = 0,
    ) -> None:
        require_choice("order", order, WINDOW_ORDERS)
        self.num_windows = (store.num_tokens - 1) // window_size if window_size >= 1 else 0
        if batch_size < 1 or self.num_windows < batch_size:
            raise ArgumentError(
                f"{store.path}: {store.num_tokens:,} tokens have {self.num_windows:,} windows of {window_size:,} and "
                f"one more; expected at least one batch of {batch_size:,}"
            )
        self.store, self.window_size, self.batch_size = store, window_size, batch_size
        self.order, self.seed, self.epoch = order, seed, -1
        self.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self.order == "random":
            raise TypeError(f"{self.store.path}: windows in random order have no length: they never end")
        return self.num_windows // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A position in this epoch is kept."""
        require_epoch(epoch)
        if epoch != self.epoch:
            self.epoch, self._step, self._resumed = epoch, 0, False
            self._order = GlobalOrder(self.num_windows, self.seed, epoch)
            self._draws = np.random.default_rng((self.seed, epoch))

    def __iter__(self) -> Iterator[Windows]:
        """Yield one epoch; in random order, for ever."""
        if self.order == "epoch" and not self._resumed:
            self._step = 0
        self._resumed = False
        while self.order == "random" or self._step < len(self):
            yield self._read()

    def __next__(self) -> Windows:
        """Return the next batch, for ever, as `get_batch` does."""
        return self.get_batch()

    def get_batch(self) -> Windows:
        """Return the next batch, for ever: after the last one of an epoch comes the first one of the next epoch."""
        if self.order == "epoch" and self._step >= len(self):
            self.set_epoch(self.epoch + 1)
        return self._read()

    def _read(self) -> Windows:
        tokens = np.empty((self.batch_size, self.window_size + 1), self.store.dtype)
        before = self._draws.bit_generator.state if self.order == "random" else None
        try:
            self.store.gather_into(self._starts(), tokens)
        except BaseException:  # the next call reads the same windows
            if before is not None:
                self._draws.bit_generator.state = before
            raise
        self._step += 1
        wide = tokens.astype(np.int64)
        return wide[:, :-1], wide[:, 1:]

    def _starts(self) -> npt.NDArray[np.int64]:
        if self.order == "random":
            return self._draws.integers(0, self.store.num_tokens - self.window_size, self.batch_size)
        windows = np.arange(self._step * self.batch_size, (self._step + 1) * self.batch_size)
        return self._order.indices(windows) * self.window_size

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, in plain JSON values."""
        draws = self._draws.bit_generator.state if self.order == "random" else None
        return {**self._identity(), "epoch": self.epoch, "step": self._step, "draws": draws}

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly where `state_dict` was taken.

        Parameters
        ----------
        force
            Take epoch and step even if they are of other tokens, another seed or windows of another shape.

        Raises
        ------
        StateError
            If the state is of other tokens, seed, order or windows, or of another kind of loader. Nothing is taken
            over then.
        """
        where, identity = self.store.path, self._identity()
        state = require_kind(where, state_dict, "windows")
        if not force:
            require_fields(where, state, [*identity, "epoch", "step", "draws"])
            require_same(where, state, identity, dict.fromkeys(identity, "; force=True takes the step all the same"))
        random = self.order == "random"
        epoch = require_count(where, state, "epoch")
        step = require_count(where, state, "step", MAX_COUNT if random else len(self))
        draws = self._draws_of(epoch, state.get("draws"), force) if random else self._draws
        self.set_epoch(epoch)
        self._step, self._draws, self._resumed = step, draws, True

    def _draws_of(self, epoch: int, found: object, force: bool) -> np.random.Generator:
        """Return the generator of an epoch in the state that was found; with `force` also of another seed."""
        draws = np.random.default_rng((self.seed, epoch))
        expected: Any = draws.bit_generator.state
        message = (
            f"{self.store.path}: state: expected draws, a state of {expected['bit_generator']}, found {shown(found)}"
        )
        try:
            draws.bit_generator.state = found  # type: ignore[assignment]
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
            raise StateError(message) from error
        taken: Any = draws.bit_generator.state
        if not force and taken["state"]["inc"] != expected["state"]["inc"]:  # of another seed or epoch
            raise StateError(message)
        return draws

    def _identity(self) -> dict[str, Any]:
        """What must agree for a step to mean the same windows."""
        return {
            "version": STATE_VERSION,
            "kind": "windows",
            "fingerprint": self.store.fingerprint,
            "order": self.order,
            "seed": self.seed,
            "window_size": self.window_size,
            "batch_size": self.batch_size,
        }

    def close(self) -> None:
        """Release the files; what is read next opens them again."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
