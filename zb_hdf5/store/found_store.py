"""A store that a look has found: its `shards.json`, or that of one of the stores for each format in a folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from zb_hdf5.errors import BackendError, Remedy
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import train_first
from zb_hdf5.formats.format import Found
from zb_hdf5.spec import INDEX_NAME, STREAM_LAYOUT
from zb_hdf5.store.both_formats import require_same_tokens, stores_by_format
from zb_hdf5.store.format_list import HDF5
from zb_hdf5.store.index import ShardIndex, find_index


@dataclass(frozen=True, kw_only=True)
class FoundStore(Found):
    """A store as one look at its path has found it.

    Attributes
    ----------
    index
        Its `shards.json`, with all splits.
    """

    index: ShardIndex

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.path.parent if self.path.name == INDEX_NAME else self.path

    def look_at_first(self, look: Look) -> None:
        return None  # the index has its name

    def of_split(self, split: str | None) -> FoundStore:
        return replace(self, split=split)

    def splits_there(self) -> list[str | None]:
        return [*train_first(self.index.of_split(self.split, self.path).table.values["split"])]


def stores_at(path: Path) -> dict[str, Path]:
    """Return the stores at a path, by their formats; one that is not a folder of several has the name "".

    The index of the latter is there, and that of any other may be lost. Empty: the path is not a store.
    """
    return {"": path} if find_index(path) else stores_by_format(path)


def store_at(path: Path, backend: str = "auto") -> FoundStore | None:
    """Return the store at a path: a folder with a `shards.json`, the `shards.json` itself, or a store for each format.

    Parameters
    ----------
    path
        A file, a folder or a URL; None is returned for one that is not a store.
    backend
        The format that is asked for, or "auto".

    Raises
    ------
    BackendError
        If the store has files of another format.
    FormatError
        If its index is damaged.
    """
    # each look at a path is a request to the servers of a parallel file system: the index of a lone store was seen
    indexed = {name: store for name, store in stores_at(path).items() if not name or find_index(store)}
    found = {name: ShardIndex.load(store) for name, store in indexed.items()}
    if not found:
        return None
    chosen = "" if "" in found else _chosen(path, backend, found)
    index = found[chosen]
    path = path / chosen if chosen else path
    if backend != "auto":
        _require_backend(path, backend, index)
    return FoundStore(path, index.backends[0], index.meta.layout, index=index)


def _chosen(folder: Path, backend: str, found: dict[str, ShardIndex]) -> str:
    """Return the format whose store is read, of a folder with one for each; "auto" takes HDF5."""
    chosen = backend
    if backend == "auto":
        chosen = HDF5 if HDF5 in found else next(iter(found))
    if chosen not in found:
        raise BackendError(f"{folder}: asked for backend {chosen!r}, found stores of {' and '.join(sorted(found))}")
    require_same_tokens(folder, {chosen: found[chosen], **found})
    return chosen


def _require_backend(path: Path, backend: str, index: ShardIndex) -> None:
    """Raise `BackendError` if a file of a store has another format than is asked for."""
    if index.meta.layout == STREAM_LAYOUT and backend != index.backends[0]:
        raise BackendError(f"{path}: asked for backend {backend!r}, found a {index.backends[0]!r} stream")
    folder = path if path.is_dir() else path.parent
    for name, found in zip(index.table.values["path"], index.table.values["backend"], strict=True):
        if found != backend:
            facts = f"{folder / name}: asked for backend {backend!r}, found {found!r}"
            raise BackendError(facts, remedy=Remedy.OTHER_KIND, at=found)
