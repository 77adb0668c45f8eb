"""`zb which`: the rows of a training step, computed from the state of a loader alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.rows import PADDING, Row, parts_of, rows_of
from zb_hdf5.commands.show import document_json, open_to_look, origin_text, records_of_batch, tokenizer_to_look
from zb_hdf5.console import counted, printable
from zb_hdf5.errors import ArgumentError, StateError
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.mixture import MixedLoader
from zb_hdf5.loaders.states import KINDS, MAX_COUNT
from zb_hdf5.loaders.steps import Request
from zb_hdf5.spec import DEFAULT_SPLIT
from zb_hdf5.store.opening import is_stream, open_reader
from zb_hdf5.store.shards import ShardedReader
from zb_hdf5.store.windows import WindowReader, windows_of
from zb_hdf5.text.readable import readable
from zb_hdf5.text.tokenizers import Tokenizer

#: Characters of the text of a piece that are printed.
TEXT_SHOWN: Final = 200
#: The parts of a loader's state that make its order, and their types.
ORDER_OF_A_STATE: Final = {"shuffle": (str,), "seed": (int,), "seq_len": (int,), "block_size": (int, type(None))}


def origins_of_batch(
    store: str, batch: int, batch_size: int | None, seq_len: int | None, tokenizer: str | None, text: bool
) -> list[dict[str, Any]]:
    """Return the origin of a stored batch, or of a batch of windows of a stream, as `origins` does."""
    with open_to_look(any_path(store), batch_size, seq_len) as reader:
        records = records_of_batch(reader, batch)
        return [{"source": store, **_origin(reader, records, reader.seq_len, tokenizer, text)}]


def origins(
    stores: tuple[str, ...],
    state_path: Path,
    step: int,
    batch_size: int | None,
    world_size: int,
    tokenizer: str | None = None,
    text: bool = False,
) -> list[dict[str, Any]]:
    """Return, for each rank, the origin of its batch at a step: source, rows by shard and stored batch, and documents.

    A row of a token stream has its file, and the range in it; two files where it passes the end of one. Documents are
    named piece by piece (None: padding), with their text if it is asked for. Raises `StateError` if the state is not
    of these stores, and `ArgumentError` if the epoch has no such step.
    """
    state = read_state(state_path)
    if (step + 1) * world_size > MAX_COUNT:
        raise ArgumentError(f"expected a step below {MAX_COUNT // world_size:,}, found {step:,}")
    steps = np.arange(step * world_size, (step + 1) * world_size)
    kind = str(state.get("kind"))
    if kind in KINDS and kind not in ("loader", "mixture"):
        raise StateError(f"{state_path}: expected the state of a Loader or a MixedLoader, found that of {KINDS[kind]}")
    if kind == "mixture":
        mixed = _mixed_loader(stores, state, state_path)
        found = [(mixed.loaders[name], name, request) for name, request in mixed.requests(steps)]
    else:
        loader = loader_of_state(stores, state, state_path, batch_size)
        if steps[-1] >= len(loader):
            whole = len(loader) // world_size
            raise ArgumentError(f"step {step:,} is behind the end of the epoch: {whole:,} steps of {world_size} ranks")
        found = [(loader, stores[0], request) for request in loader.plan.requests_of_steps(steps)]
    return [
        {"rank": rank, "source": name} | _origin(one.reader, _records(one, request), one.seq_len, tokenizer, text)
        for rank, (one, name, request) in enumerate(found)
    ]


def origins_lines(found: list[dict[str, Any]], limit: int | None) -> list[tuple[str, str]]:
    """Return the origins as (name, text) lines: stored batches or ranges of a stream, then `limit` pieces."""
    ranks = [f"rank {item['rank']}" if "rank" in item else "" for item in found]
    lines = []
    for rank, item in zip(ranks, found, strict=True):
        for row in item["rows"]:
            where = f"batch {row['batch']:,} rows {_runs(row['rows'])}" if "batch" in row else _range(row)
            lines.append((rank, f"{row['shard']} {where}"))
    pieces = [(rank, piece) for rank, item in zip(ranks, found, strict=True) for piece in item["documents"] or []]
    for rank, piece in pieces[:limit]:
        lines.append((f"{rank} row {piece['row']}".strip(), _piece_text(piece)))
        if piece.get("text") is not None:
            text, shown = printable(piece["text"]), None if limit is None else TEXT_SHOWN
            left = len(text[shown:]) if shown else 0
            lines.append(("", text[:shown] + (f" … {left:,} characters more" if left else "")))
    if left := len(pieces) - len(pieces[:limit]):
        lines.append(("left out", f"{counted(left, 'piece')} more; --all names them, --json has them"))
    if any(item["documents"] is None for item in found):
        lines.append(("documents", "none are stored with these tokens"))
    return lines


def _range(row: dict[str, Any]) -> str:
    return f"tokens {row['start']:,} to {row['stop']:,} (row {row['row']:,})"


def _runs(numbers: list[int]) -> str:
    """Write 0, 1, 2, 5 as "0-2, 5"."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _piece_text(piece: dict[str, Any]) -> str:
    columns = f"columns {piece['column']:,} to {piece['column'] + piece['tokens']:,}"
    if piece.get("document") is None:
        return f"{columns}: {'padding' if 'document' in piece else 'no document is known'}"
    first, origin = piece["first_token"], origin_text(piece)
    where = f"tokens {first:,} to {first + piece['tokens']:,} of it, offset {piece['offset']:,}"
    return f"{columns}: document {piece['document']:,}{f' ({origin})' if origin else ''}, {where}"


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a loader that a file has as JSON; raise `StateError` if it has none."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: not JSON: {error}") from error
    if not isinstance(state, dict):
        raise StateError(f"{path}: expected a JSON object, found {type(state).__name__}")
    return state


def loader_of_state(stores: tuple[str, ...], state: dict[str, Any], path: Path, batch_size: int | None) -> Loader[Any]:
    """Return a loader of one rank at the position of a state; `path` is for messages."""
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
        first = state["sources"][0]
        options = {**_options(first, path), "batch_size": _option(first, path, "batch_size", (int,))}
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
    options = {name: _option(state, path, name, kinds) for name, kinds in ORDER_OF_A_STATE.items()}
    return {name: value for name, value in options.items() if name != "block_size" or value is not None}


def _option(state: dict[str, Any], path: Path, name: str, kinds: tuple[type[Any], ...]) -> Any:
    if name not in state:
        raise StateError(f"{path}: not a loader's state: key {name!r} is missing")
    if type(state[name]) not in kinds:
        raise StateError(f"{path}: not a loader's state: {name}: expected {kinds[0].__name__}, found {state[name]!r}")
    return state[name]


def _records(loader: Loader[Any], request: Request) -> npt.NDArray[np.int64]:
    """Return the records of a request, each of the loader's `seq_len`."""
    size = loader.reader.batch_size  # a whole batch is asked for only where its records are the loader's
    return np.arange(request * size, (request + 1) * size) if isinstance(request, int) else request


def _origin(
    reader: BatchReader, records: npt.NDArray[np.int64], seq_len: int, tokenizer: str | None, text: bool
) -> dict[str, Any]:
    rows = _windows(reader, records, seq_len) if isinstance(reader, WindowReader) else _rows(reader, records, seq_len)
    known = tokenizer_to_look(reader, tokenizer) if text else None
    if text and known is None:
        raise ArgumentError(f"{reader.path}: the tokenizer of its text is not known here; pass --tokenizer")
    if not (reader.has_pieces or text):
        return {"rows": rows, "documents": None}
    found = rows_of(reader, records, seq_len)
    return {"rows": rows, "documents": [piece for n, row in enumerate(found) for piece in _pieces(n, row, known)]}


def _pieces(number: int, row: Row, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """Yield the facts of the pieces of a row."""
    for part in parts_of(row, None):
        document = row.known.get(part.document)
        piece: dict[str, Any] = {"row": number, "column": part.column, "tokens": len(part.tokens)}
        if part.document == PADDING:
            piece["document"] = None
        elif tokenizer is not None:
            piece["text"] = readable(tokenizer, part.tokens)
        if document is not None:
            piece |= {"document": part.document, "first_token": part.within, "offset": document.offset + part.within}
            piece |= document_json(document)
        yield piece


def _rows(reader: BatchReader, records: npt.NDArray[np.int64], seq_len: int) -> list[dict[str, Any]]:
    """Group records by the stored batch that holds them, in the order in which they were met."""
    rows: dict[int, list[int]] = {}
    for record in (records // (reader.seq_len // seq_len)).tolist():
        batch, row = divmod(record, reader.batch_size)
        rows.setdefault(batch, []).append(row)
    return [{**_shard_of(reader, batch), "rows": numbers} for batch, numbers in rows.items()]


def _windows(reader: WindowReader, records: npt.NDArray[np.int64], seq_len: int) -> list[dict[str, Any]]:
    starts = [reader.first_token(record, seq_len) for record in records.tolist()]
    return [
        {"row": row, "shard": str(path), "start": start, "stop": stop}
        for row, first in enumerate(starts)
        for path, start, stop in reader.store.pieces(first, first + seq_len)
    ]


def _shard_of(reader: BatchReader, batch: int) -> dict[str, Any]:
    if not isinstance(reader, ShardedReader):
        return {"shard": str(reader.path), "batch": batch}
    counts = reader.index.table.values["num_batches"]
    starts = np.cumsum(counts) - counts
    number = int(starts.searchsorted(batch, side="right")) - 1  # the index does not count a growing shard, the last one
    return {"shard": str(reader.index.shards[number].file(reader.path)), "batch": batch - int(starts[number])}
