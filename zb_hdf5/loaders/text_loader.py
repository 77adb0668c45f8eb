"""The loader of text: Parquet files are tokenized while training runs, and nothing is stored.

    row groups of this rank -> documents and boundary tokens -> one endless run of tokens -> batches

Row group g of all files, in the order of their names, belongs to rank g % world_size. A place in the run is (epoch, row
group, document, token): it names the next token exactly, however documents were grouped for the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, FormatError, StateError
from zb_hdf5.formats.batch_reader import require_choice
from zb_hdf5.loaders.prefetch import cuda_device, read_ahead, require_prefetch
from zb_hdf5.loaders.protocol import ReadingLoader
from zb_hdf5.loaders.states import STATE_VERSION, require_count, require_epoch, require_state
from zb_hdf5.loaders.steps import resolve_rank
from zb_hdf5.spec import DEFAULT_SPLIT, SPLITS
from zb_hdf5.text.corpus import ParquetFile
from zb_hdf5.text.tokenizers import BOUNDARY_POSITIONS, DEFAULT_BOUNDARY, Tokenizer, load_tokenizer, with_boundaries

if TYPE_CHECKING:
    import torch

#: Batches that "auto" makes ahead.
AUTO_PREFETCH: Final = 2
#: Text that is tokenized at once: enough work for some threads, little memory.
PIECE_CHARACTERS: Final = 1 << 17
#: Footers that are read at the same time when a loader begins: each is a small read, slow on a network file system.
FOOTER_THREADS: Final = 16
#: What to add to the message about a state that differs.
REASONS: Final = {
    "fingerprint": "; files were added, removed or written anew",
    "tokenizer": "; the same text would give other tokens",
    "world_size": "; each rank has its own row groups and position: resume with the same number of ranks",
    "rank": "; each rank saves and loads a state of its own",
}


class Place(NamedTuple):
    """The next token of a rank: `token` counts the tokens of its document, the boundary token included, from 0."""

    epoch: int
    row_group: int
    document: int
    token: int


class Piece(NamedTuple):
    """Tokens of consecutive documents of one row group, and the place of the first of them."""

    first: Place
    tokens: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.int64]

    def place(self, offset: int) -> Place:
        """Return the place of one of the tokens, or of what follows the last one."""
        number = int(np.searchsorted(self.ends, offset, side="right"))
        start = int(self.ends[number - 1]) if number else 0
        return self.first._replace(document=self.first.document + number, token=offset - start)


class TokenRun(NamedTuple):
    """The endless run of tokens of one rank, for one thread at a time: documents of row groups, with boundary tokens.

    `row_groups` maps the number among the row groups of all ranks to the file and the number in it, ascending.
    """

    row_groups: dict[int, tuple[ParquetFile, int]]
    tokenizer: Tokenizer
    boundary: tuple[int, str]
    num_threads: int

    @property
    def start(self) -> Place:
        return Place(0, min(self.row_groups, default=0), 0, 0)

    def batches(self, place: Place, tokens: int, overlap: int) -> Iterator[tuple[npt.NDArray[np.uint32], Place]]:
        """Return runs of `tokens + overlap` tokens, each `tokens` after the one before, and the place of the next.

        Raises `StateError` if there is no such place. What is checked here is not tokenized a second time.
        """
        pieces = self._pieces(place)
        first = next(pieces)
        if place.token and first.place(place.token) != place:
            raise StateError(
                f"{self.row_groups[place.row_group][0].path}: state: expected token within document "
                f"{place.document:,} of row group {place.row_group:,}, found {place.token:,}"
            )
        return self._cut(chain([first], pieces), place.token, tokens, overlap)

    @staticmethod
    def _cut(
        pieces: Iterator[Piece], offset: int, tokens: int, overlap: int
    ) -> Iterator[tuple[npt.NDArray[np.uint32], Place]]:
        waiting: deque[Piece] = deque()
        while True:
            while sum(len(piece.tokens) for piece in waiting) - offset < tokens + overlap:
                waiting.append(next(pieces))
            ready = np.concatenate([piece.tokens for piece in waiting]) if len(waiting) > 1 else waiting[0].tokens
            run = ready[offset : offset + tokens + overlap]
            offset += tokens
            while len(waiting) > 1 and offset >= len(waiting[0].tokens):
                offset -= len(waiting.popleft().tokens)
            yield run, waiting[0].place(offset)

    def _pieces(self, place: Place) -> Iterator[Piece]:
        """Yield all documents from that of `place` on, epoch after epoch."""
        for epoch in count(place.epoch):
            empty = True
            for number in self.row_groups:
                if (epoch, number) >= (place.epoch, place.row_group):
                    skip = place.document if (epoch, number) == (place.epoch, place.row_group) else 0
                    for piece in self._pieces_of_row_group(epoch, number, skip):
                        empty = False
                        yield piece
            if empty and epoch > place.epoch:
                file, _ = self.row_groups[self.start.row_group]
                raise FormatError(f"{file.path.parent}: no row group of rank {self.start.row_group} has a document")

    def _pieces_of_row_group(self, epoch: int, number: int, skip: int) -> Iterator[Piece]:
        file, number_in_file = self.row_groups[number]
        document = 0
        for block in file.row_group(number_in_file):
            texts = block.texts[max(0, skip - document) :]
            document += len(block.texts) - len(texts)
            for some in _runs(texts):
                tokens, lengths = self.tokenizer.encode(some, self.num_threads)
                tokens, lengths = with_boundaries(tokens, lengths, *self.boundary)
                yield Piece(Place(epoch, number, document, 0), tokens, np.cumsum(lengths))
                document += len(some)
        if document < skip:
            raise StateError(
                f"{file.path}: state: expected document in 0..{document:,}, the documents of row group {number:,}, "
                f"found {skip:,}"
            )


def _runs(texts: list[str]) -> Iterator[list[str]]:
    """Cut into runs that end with the text that reaches `PIECE_CHARACTERS`."""
    start = characters = 0
    for stop, text in enumerate(texts, 1):
        characters += len(text)
        if characters >= PIECE_CHARACTERS or stop == len(texts):
            yield texts[start:stop]
            start, characters = stop, 0


class TextLoader(ReadingLoader[Any]):
    """Tokenizes Parquet text while training runs.

    Parameters
    ----------
    source
        A folder of `.parquet` files, taken in the order of their names.
    tokenizer
        As for `load_tokenizer`, or a tokenizer.
    batch_size, seq_len
        Of the tensors. Batches are cut from one run of tokens: documents go on from row to row and batch to batch.
    split
        "val": the last file. "train": all others.
    targets
        True: yield `(x, y)`, both of shape (batch_size, seq_len): y[t] is the token after x[t]. Every token is a target
        once: the last of a batch is read again as the first of the next.
    boundary_token, boundary_position
        The special token of each document, and where it stands: "before" or "after" it.
    text_column
        Of the Parquet files.
    rank, world_size
        As for `Loader`. Row group g of the split belongs to rank g % world_size.
    prefetch
        Batches made ahead, by one thread that reads and `num_threads` that tokenize. "auto": 2. Batches do not depend
        on either.
    device
        A CUDA device: batches are copied there beside the computation, as `Loader` does.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, or the split has fewer row groups than there are ranks.
    FormatError, ConvertError
        If a file is not Parquet, or has no such column of text.

    Notes
    -----
    Endless: after the last row group of a rank comes its first one, in the next epoch, and ranks need not get there
    together. Count steps. Not thread-safe; picklable.

    Examples
    --------
    >>> loader = TextLoader(                                                          # doctest: +SKIP
    ...     "text", tokenizer="tiktoken:gpt2", batch_size=32, seq_len=2048, targets=True
    ... )
    >>> x, y = next(loader)                                                           # doctest: +SKIP
    """

    _endless = True

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        tokenizer: str | Tokenizer,
        batch_size: int,
        seq_len: int,
        split: str = DEFAULT_SPLIT,
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
        for name, value in {"batch_size": batch_size, "seq_len": seq_len, "num_threads": num_threads}.items():
            if value < 1:
                raise ArgumentError(f"{name} must be at least 1, found {value}")
        require_prefetch(prefetch, 1)
        require_choice("boundary_position", boundary_position, BOUNDARY_POSITIONS)
        self.path, self.split = Path(source), split
        self.batch_size, self.seq_len, self.targets = batch_size, seq_len, targets
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        boundary = (self.tokenizer.special_token_id(boundary_token), boundary_position)
        self._device = cuda_device(device)
        self._prefetch = AUTO_PREFETCH if prefetch == "auto" else int(prefetch)
        paths = _paths_of_split(self.path, split)
        files = _open_files(paths, text_column)
        self._num_row_groups = num_row_groups = sum(file.num_row_groups for file in files)
        self._run = TokenRun(self._row_groups(files, self.rank), self.tokenizer, boundary, num_threads)
        if not self._row_groups(files, self.world_size - 1):  # no rank has fewer
            raise ArgumentError(
                f"{self.path}: split {split!r} has {num_row_groups:,} row groups for {self.world_size:,} ranks: some "
                "would have no text; write smaller row groups, or evaluate on fewer ranks"
            )
        self._fingerprint = _fingerprint(paths, text_column)
        self._position: Place = self._run.start

    def _row_groups(self, files: list[ParquetFile], rank: int) -> dict[int, tuple[ParquetFile, int]]:
        """Return number among all -> file and number in it, of the row groups of a rank."""
        groups = [(file, number) for file in files for number in range(file.num_row_groups)]
        return dict(list(enumerate(groups))[rank :: self.world_size])

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The number of times that this rank has seen all of its row groups."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of an epoch, unless this rank stands in it: then it keeps its position."""
        require_epoch(epoch)
        if epoch != self.epoch:
            self._go_to(self._run.start._replace(epoch=epoch))

    def _read_from(self, position: Place) -> Generator[tuple[Any, Place]]:
        batches = self._run.batches(position, self.batch_size * self.seq_len, int(self.targets))
        return _ahead(batches, self._prefetch, self._device, (self.batch_size, self.seq_len), self.targets)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands: it counts yielded tokens, never those that were read ahead.

        Plain JSON values, under 1 KB. Each rank has one of its own: save all of them.
        """
        return {**self._identity(), **self._position._asdict()}

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue with exactly the next token, with any `batch_size`, `seq_len` and `targets`.

        One row group is read up to the document. The number of ranks must be the same: each of them stands at a place
        of its own in its own row groups, and other ranks would have other row groups.

        Parameters
        ----------
        force
            Take the place even if it is one of other files, another tokenizer, split, rank or number of ranks.

        Raises
        ------
        StateError
            If the state is of other files, another tokenizer, split, rank or number of ranks, of another kind of
            loader, or names no place in the files; the message names the field. Nothing is taken over then.
        """
        state = require_state(self.path, state_dict, self._identity(), Place._fields, REASONS, force)
        place = Place(*(require_count(self.path, state, name) for name in Place._fields))
        if place.row_group not in self._run.row_groups:
            groups = f"one of the {len(self._run.row_groups):,} of this rank"
            raise StateError(f"{self.path}: state: expected row_group {groups}, found {place.row_group:,}")
        reading = self._read_from(place)  # refuses a place that does not exist
        self._go_to(place)
        self._reading = reading

    def _identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a place to mean the same token."""
        return {
            "version": STATE_VERSION,
            "kind": "text",
            "fingerprint": self._fingerprint,
            "split": self.split,
            "num_row_groups": self._num_row_groups,
            "tokenizer": self.tokenizer.digest,
            "boundary_token_id": self._run.boundary[0],
            "boundary_position": self._run.boundary[1],
            "world_size": self.world_size,
            "rank": self.rank,
        }

    def close(self) -> None:
        """End the threads and drop the batches made ahead; the next `get_batch` makes them again."""
        self._stop_reading()


def _ahead(
    batches: Iterator[tuple[npt.NDArray[np.uint32], Place]],
    depth: int,
    device: torch.device | None,
    shape: tuple[int, int],
    targets: bool,
) -> Generator[tuple[Any, Place]]:
    """Yield the batches that one thread makes ahead, and the place behind each."""
    import torch

    def make(_: None) -> tuple[torch.Tensor, Place]:
        tokens, place = next(batches)
        return torch.from_numpy(tokens.astype(np.int64)), place

    for tokens, place in read_ahead(make, repeat(None), depth, threads=1, device=device):
        yield (tokens[:-1].view(shape), tokens[1:].view(shape)) if targets else tokens.view(shape), place


def _paths_of_split(folder: Path, split: str) -> list[Path]:
    if split not in SPLITS:
        raise ArgumentError(f"split must be one of {', '.join(SPLITS)}, found {split!r}")
    paths = sorted(folder / name for name in os.listdir(folder) if name.endswith(".parquet"))
    chosen = paths[:-1] if split == "train" else paths[-1:]
    if not chosen:
        raise ArgumentError(
            f"{folder}: found {len(paths)} .parquet files: the last one is split 'val', the others are 'train'"
        )
    return chosen


def _open_files(paths: list[Path], text_column: str) -> list[ParquetFile]:
    with ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="zb-footers") as pool:
        return list(pool.map(lambda path: ParquetFile(path, text_column), paths))


def _fingerprint(paths: list[Path], text_column: str) -> str:
    """Return a digest of the files without reading their text: of their names, sizes and footers.

    A footer says where each row group lies, how long it is, and the smallest and largest value of each column.
    """
    seen = [[path.name, path.stat().st_size, hashlib.sha256(_footer(path)).hexdigest()] for path in paths]
    return "footers:" + hashlib.sha256(json.dumps([text_column, seen]).encode()).hexdigest()


def _footer(path: Path) -> bytes:
    """Return the metadata at the end of a Parquet file, which ends with their length and "PAR1"."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return file.read(length)
