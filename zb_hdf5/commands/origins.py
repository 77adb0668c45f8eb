"""The rows of a training step, computed from the state of a loader alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.commands.rows import (
    Row,
    drawn_rows,
    first_tokens,
    open_to_look,
    part_json,
    records_of_batch,
    rows_of,
    tokenizer_to_look,
)
from zb_hdf5.console import counted
from zb_hdf5.errors import ArgumentError, StateError
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import any_path, on_failure, read_whole
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.windows import Windows
from zb_hdf5.loaders.loader import Loader, batches_of_state
from zb_hdf5.loaders.mixture import MixedLoader
from zb_hdf5.loaders.order import IndexArray, records_in
from zb_hdf5.loaders.state import MAX_COUNT, require_kind, short_repr
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.found_path import found_at, look_of
from zb_hdf5.store.opening import corpus_for_training, note_left_out, open_for_loader
from zb_hdf5.text.tokenizers import Tokenizer

#: Lines of text that are printed of a part.
LINES_SHOWN: Final = 3
#: The parts of a loader's state that make its order, and their types.
ORDER_OF_A_STATE: Final = {"shuffle": (str,), "seed": (int,), "seq_len": (int,), "block_size": (int, type(None))}


class Origin(NamedTuple):
    """The origin of a batch."""

    title: str
    name: dict[str, Any]  # its rank or its store, for programs
    shards: list[dict[str, Any]]  # its shards and stored batches
    rows: list[Row] | None  # None: their documents are not stored
    tokenizer: Tokenizer | None

    def to_json(self) -> dict[str, Any]:
        pieces = [
            {"row": number, **part_json(row, part, self.tokenizer), "tokens": len(part.tokens)}
            for number, row in enumerate(self.rows or [])
            for part in row.parts(None)
        ]
        return {**self.name, "rows": self.shards, "documents": None if self.rows is None else pieces}


def shard_lines(found: list[Origin]) -> list[tuple[str, str]]:
    """Return the shards, batches and rows of all ranks."""
    lines = [(each.title or "rows", f"{row['shard']} {_rows_text(row)}") for each in found for row in each.shards]
    if any(each.rows is None for each in found):
        lines.append(("documents", "none are stored with these tokens"))
    return lines


def drawn_origins(found: list[Origin], most_rows: int | None) -> Iterator[str]:
    """Yield the first `most_rows` rows as `zb show` draws them: their headlines, and text if a tokenizer is known."""
    rows = [(each, number, row) for each in found for number, row in enumerate(each.rows or [])]
    for each, number, row in rows[:most_rows]:
        lines = None if most_rows is None else LINES_SHOWN
        if each.tokenizer is None:
            lines = 0
        named = row._replace(name=f"{each.title} row {number}: {row.name}".strip())
        yield from drawn_rows([named], each.tokenizer, lines=lines, exact=True)
    if left := len(rows) - len(rows[:most_rows]):
        yield f"\n{counted(left, 'row')} more; --all shows them, --json has them"


def _rows_text(row: dict[str, Any]) -> str:
    """Write rows 0, 1, 2 and 5 of a batch as "rows 0-2, 5"."""
    if "batch" not in row:
        return f"tokens {row['start']:,} to {row['stop']:,} (row {row['row']:,})"
    runs = np.split(row["rows"], np.flatnonzero(np.diff(row["rows"]) != 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"batch {row['batch']:,} rows {', '.join(texts)}"


def origin_of_batch(
    store: str,
    batch: int,
    batch_size: int | None,
    seq_len: int | None,
    read_as: ReadAs,
    split: str | None,
    *,
    text: bool,
    tokenizer: str | None,
) -> Origin:
    """Return the origin of a stored batch, or of a batch of windows of a stream; `text` needs a tokenizer."""
    with open_to_look(any_path(store), batch_size, seq_len, read_as, split) as batches:
        records = records_of_batch(batches, batch)
        return _origin(
            {"source": str(any_path(store))}, batches, records, batches.seq_len, text=text, tokenizer=tokenizer
        )


def origins(
    stores: tuple[str, ...],
    state_path: Path,
    step: int,
    batch_size: int | None,
    world_size: int,
    read_as: ReadAs,
    split: str | None,
    *,
    text: bool,
    tokenizer: str | None,
) -> list[Origin]:
    """Return the origin of the batch of each rank at a step of the epoch of a state; `text` needs a tokenizer."""
    if (step + 1) * world_size > MAX_COUNT:
        raise ArgumentError(f"expected a step below {MAX_COUNT // world_size:,}, found {step:,}")
    steps = np.arange(step * world_size, (step + 1) * world_size)
    loader = opened_state(stores, state_path, batch_size, read_as, split)
    if isinstance(loader, MixedLoader):
        requests = [(loader.loaders[name], name, request) for name, request in loader.requests(steps)]
    else:
        if steps[-1] >= len(loader):
            raise ArgumentError(
                f"step {step:,} is after the end of the epoch: {len(loader) // world_size:,} steps of "
                f"{counted(world_size, 'rank')}"
            )
        requests = [(loader, str(any_path(stores[0])), request) for request in loader.plan.requests_of_steps(steps)]
    found = []
    for rank, (one, name, request) in enumerate(requests):
        records = records_in(request, one.plan.records_per_batch)
        origin = {"rank": rank, "source": name}
        found.append(_origin(origin, one.batches, records, one.seq_len, text=text, tokenizer=tokenizer))
    return found


def opened_state(
    stores: tuple[str, ...], path: Path, batch_size: int | None, read_as: ReadAs, split: str | None
) -> Loader | MixedLoader:
    """Return a loader of one rank at the position of the state in a file, also of a mixture."""
    state = read_state(path)
    if state.get("kind") != "mixture":
        return loader_of_state(stores, state, path, batch_size, read_as, split)
    if read_as != AS_STORED or split:
        raise ArgumentError(
            f"{path}: is the state of a mixture: --split, --dataset, --axes, --source-dtype and --digests "
            "are of one store"
        )
    return _mixed_loader(stores, state, path)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a loader that a file has as JSON."""
    text = read_whole(path)
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: not JSON: {error}") from error
    if not isinstance(state, dict):
        raise StateError(f"{path}: expected a JSON object, found {type(state).__name__}")
    return state


def loader_of_state(
    stores: tuple[str, ...],
    state: dict[str, Any],
    path: Path,
    batch_size: int | None,
    read_as: ReadAs = AS_STORED,
    split: str | None = None,
) -> Loader:
    """Return a loader of one rank at the position of a state; `path` is for messages."""
    if len(stores) != 1:
        raise ArgumentError(f"{path}: is the state of one store, found {len(stores)} stores")
    options = _options(require_kind(path, state, "loader"), path)
    batches = _opened(stores[0], state, path, batch_size, read_as, split)
    loader = Loader(batches, rank=0, world_size=1, batch_size=batch_size, **options)
    loader.load_state_dict(state)
    return loader


def _mixed_loader(stores: tuple[str, ...], state: dict[str, Any], path: Path) -> MixedLoader:
    sources = dict(store.partition("=")[::2] for store in stores)
    try:
        identities = {identity["name"]: identity for identity in state["sources"]}
        options = _options(state["sources"][0], path, batch_size=(int,))
    except (KeyError, IndexError, TypeError) as error:
        raise StateError(f"{path}: not a mixture's state: {error!r}") from error
    if set(sources) != set(identities):
        raise StateError(f"{path}: expected NAME=STORE for each of {[*identities]}, found {sorted(sources)}")
    ordered = {name: _opened(sources[name], identity, path) for name, identity in identities.items()}
    mixed = MixedLoader(ordered, dict.fromkeys(ordered, 1.0), rank=0, world_size=1, **options)
    mixed.load_state_dict(state)
    return mixed


def _opened(
    store: str,
    state: dict[str, Any],
    path: Path,
    batch_size: int | None = None,
    read_as: ReadAs = AS_STORED,
    split: str | None = None,
) -> Batches:
    """Open a store as the loader of a state has opened it: a stream as windows, foreign records as batches.

    Unless a split is chosen, it is the split of the state. Raises `StateError` if the state is of another store:
    nothing else that it names is of use then; or of another split than the chosen one.
    """
    with look_of(store) as look:
        found = found_at(look.path, look=look, read_as=read_as, split=None)
    there = found.splits_there()
    splits = [*there, None] if len(there) > 1 else [AUTO_SPLIT]
    refused: list[StateError] = []
    for each in [split] if split else splits:
        try:
            return _opened_split(found, look, each, state, path, batch_size)
        except StateError as error:
            refused.append(error)
    for each in splits if split else ():
        try:
            _opened_split(found, look, each, state, path, batch_size).close()
        except StateError:
            continue
        own = "of all splits" if each is None else f"of the split {each}"
        raise StateError(f"{path}: the state is {own} of {any_path(store)}, found --split {split}: leave it out")
    raise refused[0]


def _opened_split(
    found: Found, look: Look, split: str | None, state: dict[str, Any], path: Path, batch_size: int | None
) -> Batches:
    """Open a split of what a look has found, or raise `StateError`."""
    fingerprint = state.get("fingerprint")
    chosen = found.of_split(split)
    try:
        note_left_out(chosen, look)
        corpus = corpus_for_training(chosen, split)
        with on_failure(corpus.close):
            shape: tuple[int, ...] = ()
            if corpus.is_stream:
                windows = Windows.in_fingerprint(fingerprint)
                shape = windows.size, windows.stride, windows.overlap
            batches, _ = open_for_loader(corpus, *shape)
    except ArgumentError as error:
        raise StateError(f"{path}: the state names another store than {found.path}: {error}") from error
    with on_failure(corpus.close):
        if corpus.foreign_dataset is not None and batches.fingerprint != fingerprint:
            batches, _ = open_for_loader(corpus, batch_size, state.get("seq_len"))
        of_state = batches_of_state(batches, state).fingerprint
        if of_state != fingerprint:
            facts = f"its fingerprint is {short_repr(fingerprint)}, that of the store {short_repr(of_state)}"
            raise StateError(f"{path}: the state names another store than {found.path}: {facts}")
    return batches


def _options(state: Mapping[str, Any], path: Path, **more: tuple[type[Any], ...]) -> dict[str, Any]:
    """Return the arguments that make a loader of this state's order."""
    for name, kinds in (ORDER_OF_A_STATE | more).items():
        if type(state.get(name, ...)) not in kinds:
            found = f"found {state[name]!r}" if name in state else "it is missing"
            raise StateError(f"{path}: not a loader's state: {name}: expected {kinds[0].__name__}, {found}")
    order = {name: state[name] for name in (*ORDER_OF_A_STATE, *more) if state[name] is not None}
    block_size = order.pop("block_size", None)
    if block_size is not None:
        order["shuffle"] = order["shuffle"], block_size
    return order


def _origin(
    name: dict[str, Any],
    batches: Batches,
    records: IndexArray,
    seq_len: int,
    *,
    text: bool,
    tokenizer: str | None,
) -> Origin:
    known = tokenizer_to_look(batches, tokenizer) if text else None
    if text and known is None:
        raise ArgumentError(f"{batches.path}: the tokenizer of its text is not known here; pass --tokenizer")
    rows = rows_of(batches, records, seq_len) if batches.tells_documents or text else None
    title = f"rank {name['rank']}" if "rank" in name else ""
    return Origin(title, name, list(_shards(batches, records, seq_len)), rows, known)


def _shards(batches: Batches, records: IndexArray, seq_len: int) -> Iterator[dict[str, Any]]:
    """Yield the stored batches of records, in the order in which they are met; of a stream, the range of each row."""
    corpus = batches.corpus
    files = corpus.files
    starts = np.array(corpus.file_edges)
    if corpus.is_cut:
        for row, first in enumerate(first_tokens(batches, records, seq_len).tolist()):
            edges = starts[(first < starts) & (starts < first + seq_len)].tolist()
            for start, stop in pairwise([first, *dict.fromkeys(edges), first + seq_len]):
                number = int(starts.searchsorted(start, side="right")) - 1
                base = int(starts[number])
                yield {"row": row, "shard": str(files[number].path), "start": start - base, "stop": stop - base}
        return
    rows = dict[int, list[int]]()
    batch_tokens = batches.meta.batch_tokens
    for record in (records // (batches.seq_len // seq_len)).tolist():
        rows.setdefault(record // batches.batch_size, []).append(record % batches.batch_size)
    for batch, numbers in rows.items():
        number = int(starts.searchsorted(batch * batch_tokens, side="right")) - 1
        yield {"shard": str(files[number].path), "batch": batch - int(starts[number]) // batch_tokens, "rows": numbers}
