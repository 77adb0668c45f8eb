"""`zb which`: the rows that made a training step, computed from the loader's state alone."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.errors import ArgumentError, StateError
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.mixed import MixedLoader
from zb_hdf5.loaders.states import KINDS
from zb_hdf5.loaders.steps import Request
from zb_hdf5.opening import open_reader
from zb_hdf5.spec import DEFAULT_SPLIT
from zb_hdf5.store.kinds import is_stream
from zb_hdf5.store.shards import ShardedReader
from zb_hdf5.views.windows import WindowReader, windows_of


def origins(
    stores: tuple[str, ...], state_path: Path, step: int, batch_size: int | None, world_size: int
) -> list[dict[str, Any]]:
    """Return, for each rank, the origin of its batch at a step: source, and rows by shard and stored batch.

    Of a token stream: for each row its file, and which of the file's tokens it has; twice where it lies in two files.

    Raises
    ------
    StateError
        If the state is not of these stores.
    ArgumentError
        If the epoch has no such step.
    """
    try:
        state = json.loads(state_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StateError(f"{state_path}: not JSON: {error}") from error
    if not isinstance(state, dict):
        raise StateError(f"{state_path}: expected a JSON object, found {type(state).__name__}")
    steps = np.arange(step * world_size, (step + 1) * world_size)
    kind = str(state.get("kind"))
    if kind in KINDS and kind not in ("loader", "mixture"):
        raise StateError(f"{state_path}: expected the state of a Loader or a MixedLoader, found that of {KINDS[kind]}")
    if kind == "mixture":
        mixed = _mixed_loader(stores, state, state_path)
        found = [(mixed.loaders[name], name, request) for name, request in mixed.requests(steps)]
    else:
        loader = _loader(stores, state, state_path, batch_size)
        if steps[-1] >= len(loader):
            whole = len(loader) // world_size
            raise ArgumentError(f"step {step:,} is behind the end of the epoch: {whole:,} steps of {world_size} ranks")
        found = [(loader, stores[0], request) for request in loader.plan.requests_of_steps(steps)]
    return [
        {"rank": rank, "source": name, "rows": _rows(loader, request)}
        for rank, (loader, name, request) in enumerate(found)
    ]


def origins_lines(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the origins as (name, text) lines: one per stored batch, or window of a stream, that took part."""
    return [(f"rank {item['rank']}", f"{row['shard']} {_part_of_shard(row)}") for item in found for row in item["rows"]]


def _part_of_shard(row: dict[str, Any]) -> str:
    if "row" in row:
        return f"tokens {row['start']:,} to {row['stop']:,} (row {row['row']:,})"
    return f"batch {row['batch']:,} rows {_spans(row['rows'])}"


def _loader(stores: tuple[str, ...], state: dict[str, Any], path: Path, batch_size: int | None) -> Loader:
    if len(stores) != 1:
        raise ArgumentError(f"{path}: is the state of one store, found {len(stores)} stores")
    options = _options(state, path)
    loader = Loader(_opened(stores[0], state, path), rank=0, world_size=1, batch_size=batch_size, **options)
    loader.load_state_dict(state)
    return loader


def _mixed_loader(stores: tuple[str, ...], state: dict[str, Any], path: Path) -> MixedLoader:
    sources = dict(store.partition("=")[::2] for store in stores)
    try:
        names = [identity["name"] for identity in state["sources"]]
        options = {**_options(state["sources"][0], path), "batch_size": state["sources"][0]["batch_size"]}
        identities = dict(zip(names, state["sources"], strict=True))
    except (KeyError, IndexError, TypeError) as error:
        raise StateError(f"{path}: not a mixture's state: {error!r}") from error
    if set(sources) != set(names):
        raise StateError(f"{path}: expected NAME=STORE for each of {names}, found {sorted(sources)}")
    ordered = {name: _opened(sources[name], identities[name], path) for name in names}
    mixed = MixedLoader(ordered, dict.fromkeys(ordered, 1.0), rank=0, world_size=1, **options)
    mixed.load_state_dict(state)
    return mixed


def _opened(store: str, state: dict[str, Any], path: Path) -> str | BatchReader:
    """Open a token stream as the windows that a state is of; any other store is opened by the loader."""
    if not is_stream(store):
        return store
    try:
        batch_size, seq_len, overlap = windows_of(state.get("fingerprint"))
        return open_reader(store, split=DEFAULT_SPLIT, batch_size=batch_size, seq_len=seq_len, overlap=overlap)
    except ArgumentError as error:
        raise StateError(f"{path}: {error}") from error


def _options(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments that make a loader of this state's order."""
    try:
        options = {name: state[name] for name in ("shuffle", "seed", "seq_len")}
        return options if state["block_size"] is None else {**options, "block_size": state["block_size"]}
    except KeyError as error:
        raise StateError(f"{path}: not a loader's state: key {error} is missing") from error


def _rows(loader: Loader, request: Request) -> list[dict[str, Any]]:
    """Group the records of a request by the stored batch that holds them, in the order in which they were met."""
    reader = loader.reader
    if isinstance(reader, WindowReader):
        return _windows(loader, reader, request)
    per_record = reader.seq_len // loader.seq_len
    records: npt.NDArray[np.int64] = (
        np.arange(request * reader.batch_size, (request + 1) * reader.batch_size)
        if isinstance(request, int)
        else request // per_record
    )
    rows: dict[int, list[int]] = {}
    for record in records.tolist():
        batch, row = divmod(record, reader.batch_size)
        rows.setdefault(batch, []).append(row)
    return [{**_shard_of(loader, batch), "rows": numbers} for batch, numbers in rows.items()]


def _windows(loader: Loader, reader: WindowReader, request: Request) -> list[dict[str, Any]]:
    size = reader.batch_size  # a whole batch is asked for only where its windows are the loader's records
    records = range(request * size, (request + 1) * size) if isinstance(request, int) else request.tolist()
    starts = [reader.first_token(record, loader.seq_len) for record in records]
    return [
        {"row": row, "shard": str(path), "start": start, "stop": stop}
        for row, first in enumerate(starts)
        for path, start, stop in reader.store.pieces(first, first + loader.seq_len)
    ]


def _shard_of(loader: Loader, batch: int) -> dict[str, Any]:
    reader = loader.reader
    if not isinstance(reader, ShardedReader):
        return {"shard": str(reader.path), "batch": batch}
    stops = list(accumulate(shard.num_batches for shard in reader.index.shards))
    number = int(np.searchsorted(stops, batch, side="right"))
    shard = reader.index.shards[number]
    return {"shard": str(reader.path / shard.path), "batch": batch - stops[number] + shard.num_batches}


def _spans(numbers: list[int]) -> str:
    """Write 0, 1, 2, 5 as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
