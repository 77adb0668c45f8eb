"""Compares two builds: the same sources and options must give the same batches, states and messages.

    python tests/old_and_new.py compare --old CHECKOUT             # each case in both builds; exit code 1: some differ
    python tests/old_and_new.py states > tests/data/states.json    # golden states, and the batches that follow them

Each build runs in a process of its own and writes its own stores from the same sources. The new build then resumes the
states of the old one. A difference that is wanted is listed in `REVIEWED`, with its reason.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
#: Counts of steps after which the digests of an epoch are noted.
MARKS = (1, 10, 100)
#: No case takes more steps, whether or not its loader ends.
MAX_STEPS = 400
#: (pattern of cases, pattern of what differs): the reason why the builds may differ there.
REVIEWED: dict[tuple[str, str], str] = {
    ("*", "message"): "messages are rewritten; the class of an error stays",
    ("*/documents/*", "*document_ids"): "they number the segments of cu_seqlens, of which padding is one",
    ("*/documents/all", "*"): "documents has -1 for padding, and document_ids count the segments of cu_seqlens",
    ("windows", "state*"): "it is that of the Loader over the windows",
    ("*/loader/pack-multiple", "*"): "a packed batch of documents has its padding in documents and seq_lens",
}


# --- sources, the same for both builds ---------------------------------------------------------------------------
def make_sources(folder: Path) -> None:
    """Write `.npy` records and streams, JSON lines, Parquet and conversations; always the same bytes."""
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
    (folder / "text").mkdir()
    for name, part in (("a", rows[:100]), ("b", rows[100:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / "text" / f"{name}.jsonl").write_text(text)
    with contextlib.suppress(ImportError):
        table, parquet = importlib.import_module("pyarrow").table, importlib.import_module("pyarrow.parquet")
        (folder / "parquet").mkdir()
        for name, part in (("a", rows[:100]), ("b", rows[100:])):
            columns = {key: [row[key] for row in part] for key in rows[0]}
            parquet.write_table(table(columns), folder / "parquet" / f"{name}.parquet", row_group_size=30)


def documents() -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Yield the tokens of documents, with a field, spans, an id and metadata."""
    rng = np.random.default_rng(21)
    for number in range(150):
        length = int(rng.integers(0, 60))
        edges = sorted(set(rng.integers(0, length + 1, 6).tolist()))
        spans = [(a, b, {"document": number, "word": [a, b]}) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        tokens = rng.integers(0, 1000, length)
        more = {"fields": {"mask": (tokens % 2).astype("u1"), "vector": np.stack([tokens, -tokens], -1).astype("f4")}}
        yield tokens, {**more, "id": f"d{number}", "metadata": {"n": number}, "spans": spans}


def zb(*arguments: object) -> tuple[int, str, str]:
    """Run `zb` in this process; return its exit code and what it has printed on stdout and stderr."""
    testing = importlib.import_module("click.testing")
    result = testing.CliRunner().invoke(importlib.import_module("zb_hdf5.commands.zb").zb, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def convert(*arguments: object) -> None:
    code, _, errors = zb("convert", *arguments, "--quiet")
    if code:
        raise RuntimeError(f"zb convert {' '.join(map(str, arguments))}: exit code {code}: {errors}")


SHAPE, ROWS = ("--batch-size", 4, "--seq-len", 16), ("--batch-size", 4, "--seq-len", 32, "--tokenizer", "byte")
KEPT = ("--id-column", "id", "--metadata-columns", "author")
FIELDS = {"mask": "u1", "vector": ("<f4", (2,))}


def make_stores(sources: Path, to: Path) -> None:
    """Write the stores that most cases need with the build of this process."""
    from zb_hdf5 import HDF5ShardWriter

    to.mkdir()
    convert("npy-to-hdf5", sources / "records", to / "h5", *SHAPE, "--shards", 4, "--vocab-size", 50_000)
    convert("npy-to-hdf5", sources / "records", to / "wide", *SHAPE, "--shards", 3, "--dtype", "uint32")
    convert("npy-to-batch", sources / "records", to / "batch", *SHAPE, "--shards", 4)
    convert("npy-to-batch", sources / "records", to / "lone.batch", *SHAPE, "--dtype", "uint32")
    convert("npy-to-stream", sources / "long", to / "cut", "--boundary-token-id", 7)
    for packing, held_out in (("best-fit", ("--val-fraction", 0.2)), ("pad", ("--val-last-shard",))):
        options = (*ROWS, *KEPT, *held_out, "--packing", packing)
        convert("jsonl-to-hdf5", sources / "text", to / f"text-{packing}", *options)
    if (sources / "parquet").exists():
        text = ("--layout", "stream", "--tokenizer", "byte", *KEPT)
        convert("parquet-to-hdf5", sources / "parquet", to / "stream", *text)
    with HDF5ShardWriter(to / "notes.h5", dtype="uint16", boundary_token_id=999, fields=FIELDS) as writer:
        for tokens, more in documents():
            values = more.pop("fields")
            writer.write_document(tokens, values, **more)
    convert("stream-to-hdf5", to / "notes.h5", to / "packed", *SHAPE, "--packing", "best-fit", "--shards", 2)


def make_more_stores(sources: Path, to: Path) -> None:
    """Write the others."""
    from zb_hdf5 import open_writer

    convert("npy-to-hdf5", sources / "records", to / "lone.h5", *SHAPE)
    convert("npy-to-hdf5", sources / "records", to / "padded", *SHAPE, "--remainder", "pad", "--no-shuffle")
    convert("hdf5-to-batch", to / "h5", to / "same-batch")
    convert("hdf5-to-hdf5", to / "h5", to / "relaid", "--batch-size", 6, "--seq-len", 8, "--shards", 2)
    convert("hdf5-to-npy", to / "h5", to / "back")
    convert("npy-to-hdf5", to / "back", to / "again", *SHAPE, "--no-shuffle")
    with contextlib.suppress(ImportError):
        importlib.import_module("zstandard"), importlib.import_module("hdf5plugin")
        convert("npy-to-hdf5", sources / "records", to / "zstd", *SHAPE, "--shards", 2, "--codec", "zstd")
    convert("jsonl-to-hdf5", sources / "text", to / "text-concat", *ROWS, *KEPT, "--val-fraction", 0.2)
    if (sources / "parquet").exists():
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
    "int32": {"dtype": "int32", "verify": "none"},
    "ahead": {"prefetch": 3, "verify": "batch"},
    "epoch": {"epoch": 3, "batch_size": 1},
}
#: Other ways to read, on some stores in one order.
READING: dict[str, dict[str, Any]] = {
    f"{access}-{verify}": {"access": access, "verify": verify, "shuffle": "global"}
    for access in ("mmap", "pread", "h5py") for verify in ("none", "batch", "store")
}  # fmt: skip
DOCUMENT_WAYS: dict[str, dict[str, Any]] = {
    "all": {"documents": ("cu_seqlens", "max_seqlen", "seq_lens", "position_ids", "document_ids", "documents")},
    "targets": {"documents": True, "targets": True, "batch_size": 3, "rank": 1, "world_size": 2},
    "capacity": {"documents": True, "cu_seqlens_capacity": 200, "shuffle": "records"},
    "masked": {"targets": True, "documents": True, "mask_documents": [3, 20, 21]},
    "short": {"documents": ("document_ids", "position_ids"), "seq_len": 8, "targets": True},
}
DEFAULTS: dict[str, Any] = {"rank": 0, "world_size": 1}


def _named(name: str, store: str, **options: Any) -> Make:
    def make(sources: Path, stores: Path) -> Any:
        path = sources / store[4:] if store.startswith("src:") else stores / store
        chosen = DEFAULTS | options
        if "dtype" in chosen:
            chosen["dtype"] = getattr(importlib.import_module("torch"), chosen["dtype"])
        return getattr(importlib.import_module("zb_hdf5"), name)(path, **chosen)

    return make


def _loader(store: str, **options: Any) -> Make:
    return _named("Loader", store, **options)


def _made(make: Callable[[Any, Path, Path], Any]) -> Make:
    """Make a loader of several paths, or of none, with the names of the package."""
    return lambda sources, stores: make(importlib.import_module("zb_hdf5"), sources, stores)


MIXED = {"a": 0.7, "b": 0.3}
LONE: dict[str, Make] = {
    "mixture": _made(lambda zb, _, at: zb.MixedLoader({"a": at / "h5", "b": at / "wide"}, MIXED, **DEFAULTS)),
    "windows": _made(lambda zb, _, at: zb.SlidingWindowDataloader(zb.MmapTokenStore(at / "cut"), 32, 4)),
    "folder": _made(lambda zb, sources, _: zb.DatasetLoader(4, 16, 1, 2, sources / "long")),
    "native": _made(lambda zb, _, at: zb.BatchNativeLoader(at / "lone.batch", block_size=8)),
}


def _workers(sources: Path, stores: Path) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(_loader("h5", targets=True)(sources, stores).dataset(), batch_size=None, num_workers=2)


def batch_cases() -> Iterator[tuple[str, Make]]:
    for store in ("lone.h5", "lone.batch", "h5", "wide", "padded", "batch", "same-batch", "relaid", "again", "zstd"):
        for order in ORDERS if store in ("h5", "batch", "wide") else ("global", "records"):
            for way in WAYS if store in ("h5", "batch") else ("plain", "rest", "targets"):
                yield f"{store}/{order}/{way}", _loader(store, shuffle=order, block_size=16, **WAYS[way])
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
            yield f"{store}/val", _loader(store, split="val", targets=True, documents=True)
    for store in ("packed", "notes.h5", "fields.h5"):
        shape = window if store == "notes.h5" else {}
        for order in ORDERS:
            yield f"{store}/fields/{order}", _loader(store, fields=("mask", "vector"), shuffle=order, **shape)
            if store != "fields.h5":
                options = {"spans": True, "targets": True, "fields": ("mask",)}
                yield f"{store}/spans/{order}", _loader(store, shuffle=order, **options, **shape)


def loader_cases() -> Iterator[tuple[str, Make]]:
    for collate, options in {
        "pad": {"batch_size": 3}, "pack": {"max_tokens": 128}, "pad-lengths": {"batch_size": 5, "shuffle": "lengths"},
        "pack-multiple": {"max_tokens": 112, "pad_to_multiple_of": 16, "rank": 1, "world_size": 2},
    }.items():  # fmt: skip
        options |= {"collate": collate.partition("-")[0], "targets": True}
        yield f"stream/loader/{collate}", _named("DocumentLoader", "stream", too_long="truncate", **options)
        options |= {"fields": ("vector",), "spans": True, "loss_mask": "mask"}
        yield f"notes.h5/loader/{collate}", _named("DocumentLoader", "notes.h5", **options)
    text = {"tokenizer": "byte", "batch_size": 4, "seq_len": 24, "targets": True}
    yield "parquet/loader/text", _named("TextLoader", "src:parquet", **text)
    yield "parquet/loader/text-rank", _named("TextLoader", "src:parquet", **text | {"rank": 1, "world_size": 2})
    yield from LONE.items()
    yield "workers", _workers


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


def result_of(make: Make, sources: Path, stores: Path, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what a case gives: the digests of an epoch, a state in it and the digests of what follows it."""
    try:
        found: dict[str, Any] = {}
        if state is None:
            loader = make(sources, stores)
            found["whole"] = digests_of(iter(loader))
            if not hasattr(loader, "state_dict"):  # a DataLoader
                return found
            loader.close()
            with contextlib.closing(make(sources, stores)) as loader:
                for _ in islice(iter(loader), 11):
                    state = json.loads(json.dumps(loader.state_dict()))
            found["state"] = state
        with contextlib.closing(make(sources, stores)) as loader:
            loader.load_state_dict(state)
            return {**found, "rest": digests_of(iter(loader))}
    except Exception as error:  # also of one build only: it is a difference like any other
        message = str(error).replace(str(stores), "STORES").replace(str(sources), "SRC")
        return {"error": type(error).__name__, "message": message}


# --- running -----------------------------------------------------------------------------------------------------
def run_task(build: Path, task: str, *arguments: object) -> str:
    """Run a task of this file with the build at a path; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(build), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", str(HERE), task, *map(str, arguments)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def task_cases(sources: str, stores: str, wanted: str = "*", states: str = "") -> None:
    """Print the results of the cases as JSON, of what follows given states only if there are any."""
    given = json.loads(Path(states).read_text()) if states else {}
    found = {name: make for name, make in cases().items() if fnmatch.fnmatch(name, wanted)}
    if states:
        found = {name: found[name] for name in given}
    print(json.dumps({k: result_of(make, Path(sources), Path(stores), given.get(k)) for k, make in found.items()}))


def task_stores(sources: str, stores: str) -> None:
    if not Path(sources).exists():
        make_sources(Path(sources))
    make_stores(Path(sources), Path(stores))
    make_more_stores(Path(sources), Path(stores))


#: The cases whose states are kept: one of each kind of loader, data and order.
GOLDEN = (
    "h5/global/plain", "h5/records/rank", "h5/records/epoch", "h5/block/skip", "h5/sequential/rest",
    "batch/global/shape", "cut/global/targets", "stream/records/plain", "src:long/block/rank",
    "packed/documents/masked", "packed/spans/global", "notes.h5/fields/records", "text-best-fit/documents/all",
    "text-pad/val", "notes.h5/loader/pack", "stream/loader/pad-lengths", "parquet/loader/text-rank",
    "mixture", "windows", "folder", "native",
)  # fmt: skip


def task_states() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources, stores = Path(folder) / "sources", Path(folder) / "stores"
        task_stores(str(sources), str(stores))
        made = cases()
        print(json.dumps({name: result_of(made[name], sources, stores) for name in GOLDEN}, indent=1))


def differences(old: dict[str, Any], new: dict[str, Any], what: str) -> Iterator[str]:
    """Yield the names of the facts in which two results differ: `whole.10.tokens`, `state.fingerprint`."""
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{what}{name}.")
        elif a != b:
            yield f"{what}{name}: {str(a)[:150]} -> {str(b)[:150]}"


def is_reviewed(case: str, fact: str) -> bool:
    return any(fnmatch.fnmatch(case, a) and fnmatch.fnmatch(fact.partition(":")[0], b) for a, b in REVIEWED)


def compare(old: Path, new: Path, work: Path, wanted: str) -> int:
    """Run all cases in both builds and print what differs; return how many cases do."""
    sources, states = work / "sources", work / "states.json"
    results = {}
    for name, build in (("old", old), ("new", new)):
        run_task(build, "stores", sources, work / name)
        results[name] = json.loads(run_task(build, "cases", sources, work / name, wanted))
    found = {name: result["state"] for name, result in results["old"].items() if result.get("state")}
    states.write_text(json.dumps(found))
    resumed = json.loads(run_task(new, "cases", sources, work / "new", wanted, states))
    differing = 0
    for name, result in results["old"].items():
        facts = [*differences(result, results["new"][name], "")]
        if name in resumed:
            facts += differences({"rest": result.get("rest")}, resumed[name], "resumed.")
        facts = [fact for fact in facts if not is_reviewed(name, fact)]
        differing += bool(facts)
        print("".join(f"{name}: {fact}\n" for fact in facts[:4]), end="")
    failed = sum("error" in result for result in results["old"].values())
    print(f"{len(results['old'])} cases ({failed} fail in the old build), {len(resumed)} resumed: {differing} differ")
    return differing


def main(arguments: list[str]) -> int:
    import argparse

    tasks = {"stores": task_stores, "cases": task_cases, "states": task_states}
    if arguments and arguments[0] in tasks:
        tasks[arguments[0]](*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["compare", *tasks])
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the old build")
    parser.add_argument("--new", type=Path, default=HERE.parents[1], help="of the new one; by default this checkout")
    parser.add_argument("--only", default="*", help="a pattern of cases, such as 'h5/*'")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        return int(compare(options.old, options.new, Path(work), options.only) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
