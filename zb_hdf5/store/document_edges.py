"""Where the documents of many files of tokens begin and end, looked up where they are needed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.identity import Identity
from zb_hdf5.files.open_files import OpenFiles, finding
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.formats.hdf5.document_offsets import DocumentOffsets

#: So many are kept in memory, 8 MiB of them: one search in all is faster than one in each file.
FEW_DOCUMENTS: Final = 1 << 20
#: So many files are looked into at once; of more than these each is when it is needed: a thousand take seconds.
FEW_FILES: Final = 64
#: Objects that are looked into at the same time.
FAR_THREADS: Final = 32


class DocumentEdges:
    """Where documents begin and end in the tokens of all files. Thread-safe; picklable.

    Parameters
    ----------
    paths
        The files, at least one.
    starts
        The first token of each file, and the end of the last one.
    identities
        Of files that were open before, by their numbers.
    count
        Documents of all files.
    verify
        "none": no rows are compared with their crc32.
    """

    def __init__(
        self, paths: Sequence[Path], starts: Sequence[int], identities: Mapping[int, Identity], count: int,
        verify: str = "auto",
    ) -> None:  # fmt: skip
        self._paths, self._starts, self._identities, self._verify = paths, starts, identities, verify
        self._keeps = count <= FEW_DOCUMENTS and not isinstance(paths[0], RemotePath)  # each object takes a while
        self._reset()

    def _reset(self) -> None:
        self._files: OpenFiles[DocumentOffsets] = OpenFiles("auto", far=isinstance(self._paths[0], RemotePath))
        self._all: npt.NDArray[np.uint64] | None = None
        self._kept: dict[int, npt.NDArray[np.uint64]] = {}  # of few documents, until there are all

    def all(self) -> npt.NDArray[np.uint64]:
        """Return where each document begins and the last one ends, shape (D + 1,), and keep it: 8 bytes for each."""
        if self._all is None:
            with finding(self):
                if self._all is None:
                    with ThreadPoolExecutor(FAR_THREADS, thread_name_prefix="zb-edges") as pool:
                        look = pool.map if isinstance(self._paths[0], RemotePath) else map
                        ends = list(look(self._ends_of, range(len(self._paths))))
                    self._all = np.concatenate([np.zeros(1, np.uint64), *ends])
                    self._kept = {}
        return self._all

    def _ends_of(self, number: int) -> npt.NDArray[np.uint64]:
        return self._read(number)[1:] + np.uint64(self._starts[number])

    def _read(self, number: int) -> npt.NDArray[np.uint64]:
        """Return the rows of a file, of which nothing stays open."""
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        with closing(self.open(number)) as file:
            return file.rows().copy()

    def near(self, starts: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.uint64], int]:
        """Return what `pieces_of_windows` needs of `all()` for some windows.

        Parameters
        ----------
        starts, length
            The first token of each window, in any order, and the tokens of each.

        Returns
        -------
        (edges, end)
            Ascending: for each window the last edge at or before its start and all that it holds; and where the last
            document ends, if a window reaches that file.
        """
        if self._all is not None or (self._keeps and len(self._paths) - len(self._kept) <= FEW_FILES):
            edges = self.all()
            return edges, int(edges[-1])
        ordered = np.sort(starts)
        stops = ordered + length
        if not (ordered[1:] > stops[:-1]).any():  # they follow each other
            ordered, stops = ordered[:1], stops[-1:]
        found: list[npt.NDArray[np.uint64]] = []
        done: dict[int, int] = {}  # rows of each file that were taken: what two windows need is there once
        for start, stop in zip(ordered.tolist(), stops.tolist(), strict=True):
            first = bisect_right(self._starts, start, hi=len(self._paths)) - 1
            last = bisect_left(self._starts, stop, hi=len(self._paths)) - 1
            for here in range(first, last + 1):
                rows, base = self._rows(here), self._starts[here]
                edges = np.array([max(0, start - base) + 1, stop - base], np.uint64)
                low, high = rows.searchsorted(edges).tolist()
                low = max(low - 1, done.get(here, 0))
                found.append(rows[low:high] + np.uint64(base))
                done[here] = max(low, high)
        return np.concatenate(found), self._end(max(done))

    def _end(self, number: int) -> int:
        """Return where the last document ends; behind all tokens where a file behind this one holds it."""
        last = len(self._paths) - 1
        return self._starts[last] + int(self._rows(last)[-1]) if number == last else self._starts[-1]

    def _rows(self, number: int) -> npt.NDArray[np.uint64]:
        if self._keeps:
            return self._kept.setdefault(number, self._read(number))
        return (self._files.known.get(number) or self._files.open(number, self.open)).rows()

    def open(self, number: int) -> DocumentOffsets:
        """Open the offsets of one file; the caller closes them."""
        num_tokens = self._starts[number + 1] - self._starts[number]
        return DocumentOffsets(self._paths[number], num_tokens, self._identities.get(number), self._verify)

    def close(self) -> None:
        for file in self._files.files().values():
            file.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_files", "_all", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
