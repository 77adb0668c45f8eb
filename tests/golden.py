"""Sources, stores and loaders that are always the same, and digests of what the loaders give.

    python tests/golden.py states > new.json && mv new.json tests/data/states.json
    python tests/golden.py digests > new.json && mv new.json tests/data/digests.json

`states.json` has the whole results of the cases in `GOLDEN`: the digests of an epoch, a state in it, and the digests of
the steps that follow the state. `digests.json` has one digest for each of these three facts of every case. The commands
add the cases that a file lacks and leave all others alone: a golden value is never made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from commandline import succeed
from pyarrow import parquet
from reading import ordered
from torch.utils.data import DataLoader

import zb_hdf5
from zb_hdf5 import HDF5ShardWriter, open_writer
from zb_hdf5.commands.zb import zb

DATA = Path(__file__).parent / "data"
#: Counts of steps after which the digests of an epoch are noted.
MARKS = (1, 10, 100)
#: No case takes more steps, whether or not its loader ends.
MAX_STEPS = 400
#: The state of a case is that after so many steps.
STEPS_BEFORE_STATE = 11


# --- sources -----------------------------------------------------------------------------------------------------
def make_sources(folder: Path) -> None:
    """Write `.npy` records and streams, JSON lines and Parquet; always the same bytes."""
    rng = np.random.default_rng(20)
    for name, counts, shape in (("records", (500, 37, 1101), (16,)), ("long", (9000, 4001), ())):
        (folder / name).mkdir(parents=True)
        for number, count in enumerate(counts):
            np.save(folder / name / f"{number}.npy", rng.integers(0, 50_000, (count, *shape)).astype(np.uint16))
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(200)]
    rows = []
    for number in range(240):
        picked = rng.integers(0, len(words), rng.integers(1, 40))
        rows.append({"text": " ".join(words[k] for k in picked), "id": f"doc-{number}", "author": words[number % 9]})
    parts = {"a": rows[:100], "b": rows[100:]}
    (folder / "text").mkdir()
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / "text" / f"{name}.jsonl").write_text(text)
    (folder / "parquet").mkdir()
    for name, part in parts.items():
        columns = {key: [row[key] for row in part] for key in rows[0]}
        parquet.write_table(pyarrow.table(columns), folder / "parquet" / f"{name}.parquet", row_group_size=30)


def documents() -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]]:
    """Yield documents: their tokens, the values of two fields, and their id, metadata and spans."""
    rng = np.random.default_rng(21)
    for number in range(150):
        length = int(rng.integers(0, 60))
        edges = sorted(set(rng.integers(0, length + 1, 6).tolist()))
        spans = [(a, b, {"document": number, "word": [a, b]}) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        tokens = rng.integers(0, 1000, length)
        values = {"mask": (tokens % 2).astype("u1"), "vector": np.stack([tokens, -tokens], -1).astype("f4")}
        yield tokens, values, {"id": f"d{number}", "metadata": {"n": number}, "spans": spans}


# --- stores ------------------------------------------------------------------------------------------------------
def convert(*arguments: object) -> None:
    succeed(zb, "convert", *arguments, "--workers", 1, "--quiet")


SHAPE = ("--batch-size", 4, "--seq-len", 16)
ROWS = ("--batch-size", 4, "--seq-len", 32, "--tokenizer", "byte")
KEPT = ("--id-column", "id", "--metadata-columns", "author")
FIELDS = {"mask": "u1", "vector": ("<f4", (2,))}


def make_stores(sources: Path, to: Path) -> None:
    """Write the stores that the cases of `GOLDEN` need."""
    to.mkdir()
    convert("npy-to-hdf5", sources / "records", to / "h5", *SHAPE, "--shards", 4, "--vocab-size", 50_000)
    convert("npy-to-hdf5", sources / "records", to / "wide", *SHAPE, "--shards", 3, "--dtype", "uint32")
    convert("npy-to-batch", sources / "records", to / "batch", *SHAPE, "--shards", 4)
    convert("npy-to-batch", sources / "records", to / "lone.batch", *SHAPE, "--dtype", "uint32")
    convert("npy-to-stream", sources / "long", to / "cut", "--boundary-token-id", 7)
    best_fit = (*ROWS, *KEPT, "--val-fraction", 0.2, "--packing", "best-fit")
    convert("jsonl-to-hdf5", sources / "text", to / "text-best-fit", *best_fit)
    padded = (*ROWS, *KEPT, "--val-last-shard", "--packing", "pad")
    convert("jsonl-to-hdf5", sources / "text", to / "text-pad", *padded)
    stream = ("--layout", "stream", "--tokenizer", "byte", *KEPT)
    convert("parquet-to-hdf5", sources / "parquet", to / "stream", *stream)
    with HDF5ShardWriter(to / "notes.h5", dtype="uint16", boundary_token_id=999, fields=FIELDS) as writer:
        for tokens, values, more in documents():
            writer.write_document(tokens, values, **more)
    convert("stream-to-hdf5", to / "notes.h5", to / "packed", *SHAPE, "--packing", "best-fit", "--shards", 2)


def make_more_stores(sources: Path, to: Path) -> None:
    """Write the stores that only the other cases need."""
    convert("npy-to-hdf5", sources / "records", to / "lone.h5", *SHAPE)
    convert("npy-to-hdf5", sources / "records", to / "padded", *SHAPE, "--remainder", "pad", "--no-shuffle")
    convert("hdf5-to-batch", to / "h5", to / "same-batch")
    convert("hdf5-to-hdf5", to / "h5", to / "relaid", "--batch-size", 6, "--seq-len", 8, "--shards", 2)
    convert("hdf5-to-npy", to / "h5", to / "back")
    convert("npy-to-hdf5", to / "back", to / "again", *SHAPE, "--no-shuffle")
    convert("npy-to-hdf5", sources / "records", to / "zstd", *SHAPE, "--shards", 2, "--codec", "zstd")
    convert("jsonl-to-hdf5", sources / "text", to / "text-concat", *ROWS, *KEPT, "--val-fraction", 0.2)
    convert("parquet-to-hdf5", sources / "parquet", to / "parquet", *ROWS, "--shards", 2)
    with open_writer(to / "fields.h5", batch_size=4, seq_len=16, fields=FIELDS) as writer:
        tokens = np.load(sources / "records" / "0.npy").reshape(-1, 4, 16)
        writer.write(tokens, {"mask": tokens % 2, "vector": np.stack([tokens, tokens], -1)})


# --- cases -------------------------------------------------------------------------------------------------------
Make = Callable[[Path, Path], Any]
ORDERS = ("global", "records", "block", "sequential")
#: Options of a `Loader`; each is tried on each store of batches, in each order.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank": {"rank": 1, "world_size": 3},
    "shape": {"batch_size": 6, "seq_len": 8},
    "rest": {"batch_size": 7, "rank": 2, "world_size": 3, "drop_last": False},
    "skip": {"skip": [(0, 5, 50), (0, 700, 711), (1, 0, 4)], "rank": 0, "world_size": 2},
    "targets": {"targets": True, "seed": 7},
    "int32": {"dtype": torch.int32, "verify": "none"},
    "ahead": {"prefetch": 3, "verify": "batch"},
    "epoch": {"epoch": 3, "batch_size": 1},
}
#: Other ways to read, on some stores in one order.
READING: dict[str, dict[str, Any]] = {
    f"{access}-{verify}": {"access": access, "verify": verify, "shuffle": "global"}
    for access in ("mmap", "pread", "h5py")
    for verify in ("none", "batch", "store")
}
DOCUMENT_WAYS: dict[str, dict[str, Any]] = {
    "all": {"documents": ("cu_seqlens", "max_seqlen", "seq_lens", "position_ids", "document_ids", "documents")},
    "targets": {"documents": ("cu_seqlens",), "targets": True, "batch_size": 3, "rank": 1, "world_size": 2},
    "capacity": {"documents": [("cu_seqlens", 200)], "shuffle": "records"},
    "masked": {"targets": True, "documents": ("cu_seqlens",), "mask_documents": [3, 20, 21]},
    "short": {"documents": ("document_ids", "position_ids"), "seq_len": 8, "targets": True},
}
#: Options of a `DocumentLoader`; the first word of a name is the way in which it collates.
COLLATED: dict[str, dict[str, Any]] = {
    "pad": {"batch_size": 3},
    "pack": {"max_tokens": 128},
    "pad-lengths": {"batch_size": 5, "shuffle": "lengths"},
    "pack-multiple": {"collate": ("pack", 16), "max_tokens": 112, "rank": 1, "world_size": 2},
}
DEFAULTS: dict[str, Any] = {"rank": 0, "world_size": 1}


def _on(loader: type, store: str, epoch: int = 0, **options: Any) -> Make:
    """Return the case of a loader on one store; "src:text" is a folder of sources."""

    def make(sources: Path, stores: Path) -> Any:
        path = sources / store.removeprefix("src:") if store.startswith("src:") else stores / store
        made = loader(path, **{**DEFAULTS, **options})
        if epoch:
            made.set_epoch(epoch)
        return made

    return make


def _loader(store: str, **options: Any) -> Make:
    return _on(zb_hdf5.Loader, store, **options)


def _mixture(_: Path, stores: Path) -> Any:
    return zb_hdf5.MixedLoader({"a": stores / "h5", "b": stores / "wide"}, {"a": 0.7, "b": 0.3}, **DEFAULTS)


def _windows(_: Path, stores: Path) -> Any:
    return zb_hdf5.SlidingWindowDataloader(zb_hdf5.open_corpus(stores / "cut"), 32, 4)


def _workers(sources: Path, stores: Path) -> Any:
    dataset = _loader("h5", targets=True)(sources, stores).dataset()
    return DataLoader(dataset, batch_size=None, num_workers=2)


#: Cases that are made in another way than by a loader and a store.
LONE: dict[str, Make] = {
    "mixture": _mixture,
    "windows": _windows,
    "folder": lambda sources, _: zb_hdf5.DatasetLoader(4, 16, 1, 2, sources / "long"),
    "native": lambda _, stores: zb_hdf5.BatchNativeLoader(stores / "lone.batch", block_size=8),
    "workers": _workers,
}


def batch_cases() -> Iterator[tuple[str, Make]]:
    for store in ("lone.h5", "lone.batch", "h5", "wide", "padded", "batch", "same-batch", "relaid", "again", "zstd"):
        for order in ORDERS if store in ("h5", "batch", "wide") else ("global", "records"):
            for way in WAYS if store in ("h5", "batch") else ("plain", "rest", "targets"):
                yield f"{store}/{order}/{way}", _loader(store, shuffle=ordered(order, 16), **WAYS[way])
    for store in ("lone.h5", "h5", "batch", "cut", "zstd"):
        for way, options in READING.items():
            if not ("h5py" in way and store == "batch") and not (store == "zstd" and "mmap" in way):
                extra = {"batch_size": 4, "seq_len": 16} if store == "cut" else {}
                yield f"{store}/reading/{way}", _loader(store, **options, **extra)
    for store in ("cut", "stream", "src:long"):
        for order in ORDERS:
            for way in ("plain", "rank", "rest", "targets", "skip", "int32"):
                options = {"batch_size": 4, "seq_len": 24, "shuffle": order} | WAYS[way]
                yield f"{store}/{order}/{way}", _loader(store, **options, backend="npy" if ":" in store else "auto")


def document_cases() -> Iterator[tuple[str, Make]]:
    window = {"batch_size": 4, "seq_len": 32}
    for store in ("text-concat", "text-best-fit", "text-pad", "parquet", "packed", "notes.h5", "stream"):
        for way, options in DOCUMENT_WAYS.items():
            shape = window if store in ("notes.h5", "stream") else {}
            yield f"{store}/documents/{way}", _loader(store, **shape | options)
        if store.startswith("text"):
            yield f"{store}/val", _loader(store, split="val", targets=True, documents=("cu_seqlens",))
    for store in ("packed", "notes.h5", "fields.h5"):
        shape = window if store == "notes.h5" else {}
        for order in ORDERS:
            yield f"{store}/fields/{order}", _loader(store, fields=("mask", "vector"), shuffle=order, **shape)
            if store != "fields.h5":
                options = {"spans": True, "targets": True, "fields": ("mask",)}
                yield f"{store}/spans/{order}", _loader(store, shuffle=order, **options, **shape)


def loader_cases() -> Iterator[tuple[str, Make]]:
    for name, options in COLLATED.items():
        collate = {"collate": name.partition("-")[0], "targets": True, **options}
        longest = {"max_tokens": (options["max_tokens"], "truncate")} if "max_tokens" in options else {}
        yield f"stream/loader/{name}", _on(zb_hdf5.DocumentLoader, "stream", **collate | longest)
        collate |= {"fields": ("vector",), "spans": True, "targets": "mask"}
        yield f"notes.h5/loader/{name}", _on(zb_hdf5.DocumentLoader, "notes.h5", **collate)
    text = {"tokenizer": "byte", "batch_size": 4, "seq_len": 24, "targets": True}
    yield "parquet/loader/text", _on(zb_hdf5.TextLoader, "src:parquet", **text)
    yield "parquet/loader/text-rank", _on(zb_hdf5.TextLoader, "src:parquet", **text, rank=1, world_size=2)
    yield from LONE.items()


def cases() -> dict[str, Make]:
    """Return every case by its name, `store/order/way`."""
    return dict([*batch_cases(), *document_cases(), *loader_cases()])


# --- digests -----------------------------------------------------------------------------------------------------
def parts_of(step: Any) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of everything that a step holds."""
    if isinstance(step, tuple | list):
        step = dict(zip(("tokens", "targets"), step, strict=True))
    for name, value in (step if isinstance(step, Mapping) else {"tokens": step}).items():
        array = value.numpy() if hasattr(value, "numpy") else value
        if isinstance(array, np.ndarray):
            yield name, f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        else:
            yield name, json.dumps(array, sort_keys=True).encode()


def digests_of(steps: Iterator[Any]) -> dict[str, Any]:
    """Return a digest for each part of the steps, after each of `MARKS` and at the end."""
    digests: dict[str, Any] = {}
    noted: dict[str, dict[str, str]] = {}
    count = 0
    for count, step in enumerate(islice(steps, MAX_STEPS), start=1):
        for name, content in parts_of(step):
            digests.setdefault(name, hashlib.sha256()).update(content)
        if count in MARKS:
            noted[str(count)] = {name: digest.hexdigest()[:12] for name, digest in digests.items()}
    return {**noted, "end": {name: digest.hexdigest()[:12] for name, digest in digests.items()}, "steps": count}


def result_of(make: Make, sources: Path, stores: Path) -> dict[str, Any]:
    """Return the digests of an epoch, a state in it, and the digests of the steps that follow the state."""
    loader = as_before(make(sources, stores))
    found: dict[str, Any] = {"whole": digests_of(iter(loader))}
    if not hasattr(loader, "state_dict"):  # a DataLoader
        return found
    loader.close()
    with contextlib.closing(as_before(make(sources, stores))) as loader:
        for _ in islice(iter(loader), STEPS_BEFORE_STATE):
            state = json.loads(json.dumps(loader.state_dict()))
    return {**found, "state": state, "rest": resumed(make, sources, stores, state)}


def as_before(loader: Any) -> Any:
    """Return a loader as a state of its first step continues it, of version 2, which earlier builds took."""
    state = loader.state_dict() if hasattr(loader, "state_dict") else {"version": 2}
    if state["version"] != 2:
        loader.load_state_dict({**state, "version": 2})
    return loader


def resumed(make: Make, sources: Path, stores: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of the steps that follow a state."""
    with contextlib.closing(make(sources, stores)) as loader:
        loader.load_state_dict(state)
        return digests_of(iter(loader))


def digest_of(result: dict[str, Any]) -> dict[str, str]:
    """Return one digest for each fact of a result."""
    facts = {name: json.dumps(fact, sort_keys=True).encode() for name, fact in result.items()}
    return {name: hashlib.sha256(fact).hexdigest()[:12] for name, fact in facts.items()}


#: The cases whose whole results are kept: one of each kind of loader, data and order.
GOLDEN = (
    "h5/global/plain",
    "h5/records/rank",
    "h5/records/epoch",
    "h5/block/skip",
    "h5/sequential/rest",
    "batch/global/shape",
    "cut/global/targets",
    "stream/records/plain",
    "src:long/block/rank",
    "packed/documents/masked",
    "packed/spans/global",
    "notes.h5/fields/records",
    "text-best-fit/documents/all",
    "text-pad/val",
    "notes.h5/loader/pack",
    "stream/loader/pad-lengths",
    "parquet/loader/text-rank",
    "mixture",
    "windows",
    "folder",
    "native",
)


def differences(golden: dict[str, Any], found: dict[str, Any], name: str = "") -> Iterator[str]:
    """Yield the facts in which two results differ: "whole.10.tokens: ... -> ...", "state.fingerprint: ..."."""
    for key in sorted({*golden, *found}):
        expected, value = golden.get(key), found.get(key)
        if isinstance(expected, dict) and isinstance(value, dict):
            yield from differences(expected, value, f"{name}{key}.")
        elif expected != value:
            yield f"{name}{key}: {str(expected)[:150]} -> {str(value)[:150]}"


# --- the files ---------------------------------------------------------------------------------------------------
def load(kind: str) -> dict[str, Any]:
    """Return the golden "states" or "digests", by case."""
    return dict(json.loads((DATA / f"{kind}.json").read_text()))


def with_new_cases(kind: str) -> dict[str, Any]:
    """Return the golden values, and those of the cases that have none yet."""
    golden, made = load(kind), cases()
    with tempfile.TemporaryDirectory() as folder:
        sources, stores = Path(folder) / "sources", Path(folder) / "stores"
        make_sources(sources)
        make_stores(sources, stores)
        make_more_stores(sources, stores)
        for name in GOLDEN if kind == "states" else made:
            if name not in golden:
                result = result_of(made[name], sources, stores)
                golden[name] = result if kind == "states" else digest_of(result)
    return golden


if __name__ == "__main__":
    golden = with_new_cases(sys.argv[1])
    if sys.argv[1] == "states":
        print(json.dumps(golden, indent=1))
    else:  # one line a case
        lines = [f" {json.dumps(name)}: {json.dumps(facts)}" for name, facts in golden.items()]
        print("{", ",\n".join(lines), "}", sep="\n")
