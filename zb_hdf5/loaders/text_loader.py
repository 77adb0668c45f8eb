"""The loader of text: Parquet files are tokenized while training runs, and nothing is stored.

Row group g of all files, in the order of their names, belongs to rank g % world_size. A place in the run is (epoch, row
group, document, token): it names the next token exactly, however documents were grouped for the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from copy import copy
from itertools import chain, count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Unpack, overload

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import row_of_source
from zb_hdf5.errors import ArgumentError, FormatError, Remedy, StateError, require_choice, require_positive
from zb_hdf5.files.listing import listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT, named_splits, train_first
from zb_hdf5.files.paths import local_path, open_file
from zb_hdf5.files.publishing import require_present
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.loaders.ahead import cuda_device, read_to, require_prefetch
from zb_hdf5.loaders.loader_options import PairBatch, TextLoaderOptions, TokenBatch
from zb_hdf5.loaders.order import resolve_rank
from zb_hdf5.loaders.state import STATE_VERSION, require_count, require_fields
from zb_hdf5.loaders.steps import BatchT
from zb_hdf5.loaders.token_loader import TokenLoader
from zb_hdf5.notes import note
from zb_hdf5.packages import LaterModule, from_numpy
from zb_hdf5.spec import DEFAULT_SPLIT, SPLITS
from zb_hdf5.text.dropped import Reason
from zb_hdf5.text.parquet_file import ParquetFile
from zb_hdf5.text.tokenizers import DEFAULT_BOUNDARY, Tokenizer, load_tokenizer, with_boundaries

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch", "torch")

#: Batches of text that prefetch="auto" makes ahead.
TEXT_BATCHES_AHEAD: Final = 2
#: Footers that are read at the same time when a loader begins: each is a small read, slow on a network file system.
FOOTER_THREADS: Final = 16


class Place(NamedTuple):
    """The next token of a rank: `token` counts the tokens of its document, the boundary token included, from 0."""

    epoch: int
    row_group: int
    document: int
    token: int


def _cut(
    documents: Iterator[tuple[Place, npt.NDArray[np.uint32]]],
    offset: int,
    tokens: int,
    overlap: int,
) -> Iterator[tuple[npt.NDArray[np.uint32], Place]]:
    """Yield runs of `tokens + overlap` tokens, each `tokens` after the one before, and the place of the next.

    Parameters
    ----------
    documents
        The place and the tokens of each document.
    offset
        Tokens of the first document that come before the first run.
    tokens, overlap
        The new tokens of a run, and its last ones, with which the next run begins.
    """
    waiting = deque[tuple[Place, npt.NDArray[np.uint32]]]()
    more = -offset - tokens - overlap  # tokens of the waiting documents after the end of the run
    while True:
        while more < 0:
            waiting.append(next(documents))
            more += len(waiting[-1][1])
        parts = [part for _, part in waiting]
        parts[-1] = parts[-1][: len(parts[-1]) - more]
        parts[0] = parts[0][offset:]
        offset += tokens
        more -= tokens
        while len(waiting) > 1 and offset >= len(waiting[0][1]):
            offset -= len(waiting.popleft()[1])
        place, first = waiting[0]
        following = {"token": offset} if offset < len(first) else {"document": place.document + 1}
        yield np.concatenate(parts), place._replace(**following)


class TextLoader(TokenLoader[BatchT]):
    """Tokenizes Parquet text while training runs.

    Parameters
    ----------
    source
        A folder of `.parquet` files, taken in the order of their names.
    tokenizer
        As for `load_tokenizer`, or a tokenizer.
    batch_size, seq_len
        Shape of the tensors, cut from one run of tokens: documents go on from row to row and batch to batch.
    split
        "train", "val" or "test", as the names of the files tell; else "val" is the last file, "train" all others.
        "auto" is "train".
    targets
        True: yield `(x, y)`, both of shape (batch_size, seq_len): y[t] is the token after x[t]. Every token is a target
        once: the last of a batch is read again as the first of the next.
    boundary_token, boundary_position
        The special token of each document, and where it stands: "before" or "after" it.
    text_column
        Column of the Parquet files.
    rank, world_size
        As for `Loader`. Row group g of the split belongs to rank g % world_size.
    prefetch
        Batches made ahead, by one thread that reads and `num_threads` that tokenize. "auto": 2. Batches do not depend
        on either.
    device
        A CUDA device: batches are copied there during the computation, as `Loader` does.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, or the split has fewer row groups than there are ranks.
    FormatError, ConvertError
        If a file is not Parquet, or has no such column of text.

    Notes
    -----
    Endless: after the last row group of a rank comes its first one, in the next epoch, and ranks need not get there
    together. Count steps. Each rank has a state of its own: save all of them. A state fits any `batch_size`, `seq_len`
    and `targets`, but only the same files, tokenizer, split, rank and number of ranks. Not thread-safe; picklable.

    Examples
    --------
    >>> loader = TextLoader(                                                          # doctest: +SKIP
    ...     "text", tokenizer="tiktoken:gpt2", batch_size=32, seq_len=2048, targets=True
    ... )
    >>> x, y = next(loader)                                                           # doctest: +SKIP
    """

    _endless = True

    @overload
    def __init__(
        self: TextLoader[TokenBatch],
        source: str | os.PathLike[str],
        *,
        tokenizer: str | Tokenizer,
        batch_size: int,
        seq_len: int,
        targets: Literal[False] = ...,
        **options: Unpack[TextLoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: TextLoader[PairBatch],
        source: str | os.PathLike[str],
        *,
        tokenizer: str | Tokenizer,
        batch_size: int,
        seq_len: int,
        targets: Literal[True],
        **options: Unpack[TextLoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: TextLoader[Any],
        source: str | os.PathLike[str],
        *,
        tokenizer: str | Tokenizer,
        batch_size: int,
        seq_len: int,
        targets: bool,
        **options: Unpack[TextLoaderOptions],
    ) -> None: ...

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        tokenizer: str | Tokenizer,
        batch_size: int,
        seq_len: int,
        split: str = AUTO_SPLIT,
        targets: bool = False,
        boundary_token: str = DEFAULT_BOUNDARY,
        boundary_position: str = "before",
        text_column: str = "text",
        rank: int | None = None,
        world_size: int | None = None,
        num_threads: int = 4,
        prefetch: int | str = "auto",
        device: str | torch.device | None = None,
    ) -> None:
        require_positive(batch_size=batch_size, seq_len=seq_len, num_threads=num_threads)
        require_prefetch(prefetch, 1)
        require_choice("boundary_position", boundary_position, ("before", "after"))
        self.path = local_path(source)
        self.split = split = DEFAULT_SPLIT if split == AUTO_SPLIT else split
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.targets = targets
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._boundary = (self.tokenizer.special_token_id(boundary_token), boundary_position)
        self._num_threads = num_threads
        self._device = cuda_device(device)
        self._prefetch = TEXT_BATCHES_AHEAD if prefetch == "auto" else int(prefetch)
        paths = paths_of_split(self.path, split)
        with ReadPool(FOOTER_THREADS, "zb-footers") as readers:
            files = readers.map(lambda path: ParquetFile(path, text_column), paths)
        self._num_row_groups = num_row_groups = sum(file.num_row_groups for file in files)
        self._groups = self._row_groups(files, self.rank)
        if not self._row_groups(files, self.world_size - 1):  # no rank has fewer
            raise ArgumentError(
                f"{self.path}: split {split!r} has {num_row_groups:,} row groups for {self.world_size:,} ranks: some "
                "would have no text; write smaller row groups, or evaluate on fewer ranks"
            )
        self._fingerprint = _fingerprint(paths, text_column)
        self._position: Place = Place(0, min(self._groups), 0, 0)

    def _row_groups(self, files: list[ParquetFile], rank: int) -> dict[int, tuple[ParquetFile, int]]:
        """Return the row groups of a rank: number among all -> file, and number in it."""
        groups = [(file, number) for file in files for number in range(file.num_row_groups)]
        return dict(list(enumerate(groups))[rank :: self.world_size])

    def __repr__(self) -> str:
        shape = f"batch_size={self.batch_size}, seq_len={self.seq_len}"
        where = f"epoch={self.epoch}, rank={self.rank}, world_size={self.world_size}"
        text = f"tokenizer={self.tokenizer.spec!r}, split={self.split!r}"
        return f"{type(self).__name__}({str(self.path)!r}, {text}, {shape}, {where})"

    def close(self) -> None:
        super().close()
        for file, _ in self._groups.values():
            file.close()

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The number of times that this rank has seen all of its row groups."""
        return self._position.epoch

    def _start(self, epoch: int) -> Place:
        return Place(epoch, min(self._groups), 0, 0)

    def _read_from(self, position: Place) -> Generator[tuple[Any, Place]]:
        shape = (self.batch_size, self.seq_len)
        targets = self.targets
        batches = copy(self)._batches_from(position, self.batch_size * self.seq_len, int(targets))

        def make(_: None) -> tuple[torch.Tensor, Place]:
            tokens, place = next(batches)
            return from_numpy()(tokens.astype(np.int64)), place

        made = read_to(self._device, make, repeat(None), self._prefetch, 1)
        if not targets:
            return ((tokens.view(shape), place) for tokens, place in made)
        return (((tokens[:-1].view(shape), tokens[1:].view(shape)), place) for tokens, place in made)

    def _batches_from(self, place: Place, tokens: int, overlap: int) -> Iterator[tuple[npt.NDArray[np.uint32], Place]]:
        """Return the runs of `_cut` from a place on; `StateError` if there is no such place."""
        documents = self._documents(place)
        first, encoded = next(documents)
        if place.token and (first._replace(token=place.token) != place or place.token >= len(encoded)):
            raise StateError(
                f"{self._groups[place.row_group][0].path}: state: expected token within document "
                f"{place.document:,} of row group {place.row_group:,}, found {place.token:,}"
            )
        return _cut(chain([(first, encoded)], documents), place.token, tokens, overlap)

    def _documents(self, place: Place) -> Iterator[tuple[Place, npt.NDArray[np.uint32]]]:
        """Yield the place and the tokens of each document from a place on, epoch after epoch."""
        for epoch in count(place.epoch):
            empty = True
            for number, (file, number_in_file) in self._groups.items():
                if (epoch, number) < place[:2]:
                    continue
                document = 0
                skip = place.document if (epoch, number) == place[:2] else 0
                for block in file.row_group(number_in_file):
                    texts = block.texts[max(0, skip - document) :]
                    document += len(block.texts) - len(texts)
                    if not texts:
                        continue
                    rows = block.rows[-len(texts) :]
                    for row, tokens in zip(rows, self._encoded(texts), strict=True):
                        if tokens is None:
                            note(f"{row_of_source(file.path, row)}: {Reason.REFUSED}, and left out")
                        else:
                            empty = False
                            yield Place(epoch, number, document, 0), tokens
                        document += 1
                if document < skip:
                    raise StateError(
                        f"{file.path}: state: expected document in 0..{document:,}, the documents of row group "
                        f"{number:,}, found {skip:,}"
                    )
            if empty and epoch > place.epoch:
                raise FormatError(f"{file.path.parent}: no row group of rank {min(self._groups)} has a document")

    def _encoded(self, texts: list[str]) -> list[npt.NDArray[np.uint32] | None]:
        """Return the tokens of each document, its boundary token included; None of one that the tokenizer refuses."""
        found = self.tokenizer.encode_each(texts, self._num_threads)
        encoded = [each for each in found if not isinstance(each, FormatError)]
        lengths = np.array([len(each) for each in encoded], np.int64)
        tokens = np.concatenate([np.empty(0, np.uint32), *encoded])
        tokens, lengths = with_boundaries(tokens, lengths, *self._boundary)
        parts = iter(np.split(tokens, np.cumsum(lengths)[:-1]))
        return [None if isinstance(each, FormatError) else next(parts) for each in found]

    def _place(self) -> dict[str, Any]:
        return self._position._asdict()

    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        if not force:
            require_fields(self.path, state, self.identity(), Place._fields, Remedy.FORCE)
        place = Place(*(require_count(self.path, state, name) for name in Place._fields))
        if place.row_group not in self._groups:
            raise StateError(
                f"{self.path}: state: expected row_group one of the {len(self._groups):,} of this rank, "
                f"found {place.row_group:,}"
            )
        reading = self._read_from(place)  # refuses a place that does not exist
        self._go_to(place)
        self._reading = reading

    def identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a place to mean the same token."""
        return {
            "version": STATE_VERSION,
            "kind": "text",
            "fingerprint": self._fingerprint,
            "split": self.split,
            "num_row_groups": self._num_row_groups,
            "tokenizer": self.tokenizer.digest,
            "boundary_token_id": self._boundary[0],
            "boundary_position": self._boundary[1],
            "world_size": self.world_size,
            "rank": self.rank,
        }


def paths_of_split(folder: Path, split: str) -> list[Path]:
    """Return the `.parquet` files of a split, as their names tell; else the last one is "val", the others "train"."""
    require_choice("split", split, SPLITS)
    require_present(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder}: expected a folder of .parquet files, found a file")
    paths = [*listed(Look(folder), ".parquet").files]
    try:
        told = named_splits(paths, [folder])
    except ArgumentError as error:
        raise ArgumentError(
            f"{folder}: the names of its files tell the splits of some only, or two of one: move the others to another "
            "folder"
        ) from error
    if len({*told}) > 1:
        return _files_of_split(folder, dict(zip(paths, told, strict=True)), split)
    chosen = {"train": paths[:-1], "val": paths[-1:]}.get(split, [])
    if not chosen:
        raise ArgumentError(
            f"{folder}: found {len(paths)} .parquet files: the last one is split 'val', the others are 'train'"
        )
    return chosen


def _files_of_split(folder: Path, told: Mapping[Path, str], split: str) -> list[Path]:
    """Return the files of a split, of those in a folder that are told one each."""
    if split not in told.values():
        known = ", ".join(train_first(told.values()))
        raise ArgumentError(f"{folder}: expected a split that its files have ({known}), found {split!r}")
    return [path for path, each in told.items() if each == split]


def _fingerprint(paths: list[Path], text_column: str) -> str:
    """Return a digest of names, sizes and footers of the files; a footer describes each row group and column."""
    seen = []
    for path in paths:
        with open_file(path) as file:
            file.seek(-8, os.SEEK_END)  # the footer, its length, "PAR1"
            length = int.from_bytes(file.read(4), "little")
            size = file.seek(0, os.SEEK_END)
            file.seek(-8 - length, os.SEEK_END)
            seen.append([path.name, size, hashlib.sha256(file.read(length)).hexdigest()])
    return "footers:" + hashlib.sha256(json.dumps([text_column, seen]).encode()).hexdigest()
