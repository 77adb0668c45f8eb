"""Facts of every kind of path that stay as they are when the code that opens paths is built anew.

    python tests/pins.py > new.json && mv new.json tests/data/pins.json

The command adds the facts that the file lacks and leaves all others alone: a pinned value is never made again.

The values are those of the code before paths were opened by one look. Changed on purpose since then, and listed here
before they were pinned:

- `.npy` files of two axes, and folders of them, are read in place as records: `facts/` and `reports/` of `records-npy`
  and `records-npy-folder` are new. Their fingerprints are those of HDF5 files of the same records, and their digests
  have the length of a record, `record_tokens`.
- A dataset of the shape (N, 2..4, S) needs `axes` or `channel`, whatever it holds: such kinds name one of them here.
- How files are read is one value, `read_as`, and no argument for each part; `open_stream` is gone. The options of the
  kinds are spelled by their old names, which `reading` turns into that value: no pinned fact has them.
- The version of the JSON of commands is younger than the pins: it is compared with `JSON_VERSION`, and not pinned.
- Files are opened less often: `opens` are a bound, which no file may pass.
- A lone file of another program is resumed at any batch size. Its states keep their text.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import golden
import h5py
import numpy as np
from commandline import run_zb
from contents import files_in
from interrupted import Stops
from processes import killed_after
from reading import reading
from servers import empty_bucket, put_files, serving_s3

from zb_hdf5 import Loader, convert, open_field_set, open_reader, open_writer, write_digests
from zb_hdf5.console import JSON_VERSION
from zb_hdf5.converters.engines import Engine
from zb_hdf5.converters.journal import JOURNAL_PREFIX, read_journal
from zb_hdf5.field import Field
from zb_hdf5.spec import EXTENTS

PINS = golden.DATA / "pins.json"
WRITTEN = golden.DATA / "trainers"
ORDERS = golden.ORDERS
#: Steps before the state that is pinned.
STEPS = 3
#: The shape of windows over a stream.
WINDOWS: dict[str, Any] = {"batch_size": 4, "seq_len": 16}
#: An entry of `facts` whose value differs from run to run, or from machine to machine.
HIDDEN = "*"
#: The id of a live store, in its fingerprint.
_LIVE_ID = re.compile("live:[0-9a-f]{32}")
#: Keys of reports that name a time, a place or a size on this disk.
NOT_PINNED = frozenset(
    ("bytes", "seconds", "path", "modified", "created", "written", "version", "source", "files", "started", "host")
)


@dataclass(frozen=True)
class Kind:
    """One kind of path: where it lies in the folder of all kinds, and how it is read.

    Attributes
    ----------
    path
        Below the folder of all kinds.
    options
        The arguments of `open_reader` and of `Loader` by which it is read.
    shape
        The shape of its windows, or of its batches.
    digests
        It is read with digests that are made.
    """

    path: str
    options: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    digests: bool = False

    @property
    def grows(self) -> bool:
        """Whether it is not finished: then it has no cache."""
        return self.path == "growing"


OLMO = {"source_dtype": "uint16"}
RECORDS = {"batch_size": 4}
CHANNELS = {"channel": 0, "field_channels": {"loss_mask": 1}}
_FLAT = {
    "megatron": ({}, "corpus_text_document.bin"),
    "datatrove": ({}, "00000_unshuffled.ds"),
    "llmc": ({}, "part_train_000001.bin"),
    "olmo": (OLMO, "part-0-00000.npy"),
    "nanogpt": (OLMO, "ids.bin"),
    "npy": ({}, "0.npy"),
    "stream-hdf5": ({}, "0.h5"),
}


def kinds() -> dict[str, Kind]:
    """Return every kind of path by its name."""
    found = {
        "store": Kind("h5"),
        "store-batch": Kind("batch"),
        "lone-hdf5": Kind("lone.h5"),
        "lone-batch": Kind("lone.batch"),
        "compressed": Kind("zstd"),
        "both-formats": Kind("both"),
        "both-formats-batch": Kind("both", {"backend": "batch"}),
        "text-store": Kind("text-best-fit", {"split": "train"}),
        "live": Kind("live"),
        "live-growing": Kind("growing"),
        "stream-store": Kind("cut", shape=WINDOWS),
        "lone-stream": Kind("notes.h5", shape=WINDOWS),
    }
    without = {
        "records-hdf5": Kind("foreign/records.h5", shape=RECORDS),
        "records-hdf5-folder": Kind("foreign/records", shape=RECORDS),
        "batches-hdf5": Kind("foreign/batches.h5", {"axes": "batch,record,token"}),
        "batches-hdf5-folder": Kind("foreign/batches", {"axes": "batch,record,token"}),
        "channels-hdf5": Kind("foreign/channels.h5", CHANNELS, RECORDS),
        "channels-hdf5-folder": Kind("foreign/channels", CHANNELS, RECORDS),
        "records-npy": Kind("flat/npy-records/0.npy", shape=RECORDS),
        "records-npy-folder": Kind("flat/npy-records", shape=RECORDS),
    }
    for name, (options, file) in _FLAT.items():
        without[name] = Kind(f"flat/{name}/{file}", options, WINDOWS)
        without[f"{name}-folder"] = Kind(f"flat/{name}", options, WINDOWS)
    for name, kind in without.items():
        found[name] = kind
        found[f"{name}-digests"] = replace(kind, digests=True)
    return found


def make_kinds(folder: Path) -> None:
    """Write everything that the kinds name; always the same bytes."""
    sources = folder / "sources"
    golden.make_sources(sources)
    golden.make_stores(sources, folder / "made")
    golden.make_more_stores(sources, folder / "made")
    for path in (folder / "made").iterdir():
        path.rename(folder / path.name)
    (folder / "both").mkdir()
    shutil.copytree(folder / "h5", folder / "both" / "hdf5")
    shutil.copytree(folder / "same-batch", folder / "both" / "batch")
    _write_live(folder / "live", sources, finishes=True)
    killed_after(lambda: _write_live(folder / "growing", sources, finishes=False))
    shutil.copytree(folder / "h5", folder / "scored")
    _write_set(folder / "scored")
    _make_flat(folder / "flat", sources)
    _make_foreign(folder / "foreign")
    (folder / "flat" / "npy-records").mkdir()
    for number in range(2):
        with h5py.File(folder / "foreign" / "records" / f"{number}.h5") as h5:
            np.save(folder / "flat" / "npy-records" / f"{number}.npy", h5["input_ids"][:])


def _write_live(folder: Path, sources: Path, *, finishes: bool) -> None:
    """Write a live store of two whole shards and a part of a third one."""
    batches = np.load(sources / "records" / "0.npy")[:80].reshape(-1, 4, 16)
    writer = open_writer(folder, batch_size=4, seq_len=16, dtype="uint16", live=True, shard_batches=8)
    for start in range(0, len(batches), 5):
        writer.write(batches[start : start + 5])
    if finishes:
        writer.finish()


def _write_set(store: Path) -> None:
    """Write a finished field set of a store, with one value for each record."""
    with open_field_set(store, "scores", [Field("score", np.dtype("f4"), unit="record")]) as found:
        for step in found.missing(batch_size=64, quiet=True):
            found.write(step["records"], score=np.asarray(step["records"], "f4"))
        found.finish()


def _make_flat(folder: Path, sources: Path) -> None:
    """Write a folder of two files for each flat format; the first one is a kind of its own."""
    folder.mkdir()
    copies = {"megatron": "megatron/uint16", "datatrove": "datatrove/uint16", "llmc": "bin/gpt2", "olmo": "olmo/uint16"}
    for name, written in copies.items():
        shutil.copytree(WRITTEN / written, folder / name, ignore=shutil.ignore_patterns("truth.json"))
        if name == "llmc":
            continue
        for file in sorted((folder / name).iterdir()):
            shutil.copyfile(file, folder / name / f"z-{file.name}")
    (folder / "nanogpt").mkdir()
    shutil.copytree(sources / "long", folder / "npy")
    (folder / "stream-hdf5").mkdir()
    for number, name in enumerate(("ids.bin", "more.bin")):
        ids = np.load(sources / "long" / f"{number}.npy")
        ids.tofile(folder / "nanogpt" / name)
        with h5py.File(folder / "stream-hdf5" / f"{number}.h5", "w") as h5:
            h5["tokens"] = ids


def _make_foreign(folder: Path) -> None:
    """Write HDF5 files of another program, of two and three axes, with channels, and folders of two of them."""
    rng = np.random.default_rng(22)
    rows = rng.integers(0, 30_000, (64, 24), np.int32)
    channels = np.stack([rows, rows % 2, rows], axis=1)
    for name, values in {"records": rows, "batches": rows.reshape(-1, 4, 24), "channels": channels}.items():
        half = len(values) // 2
        (folder / name).mkdir(parents=True)
        parts = {f"{name}.h5": values, f"{name}/0.h5": values[:half], f"{name}/1.h5": values[half:]}
        for path, part in parts.items():
            with h5py.File(folder / path, "w") as h5:
                h5["input_ids"] = part


# --- facts -------------------------------------------------------------------------------------------------------
_opened: list[str] | None = None


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    """Note a file that Python opens while somebody counts."""
    if _opened is not None and event == "open" and isinstance(arguments[0], str | bytes):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_open)


@contextlib.contextmanager
def counted_opens(folder: Path) -> Iterator[dict[str, int]]:
    """Count how often Python opens each file below a folder; HDF5's own opens are not seen."""
    global _opened
    counts: dict[str, int] = {}
    _opened = []
    try:
        yield counts
    finally:
        paths = [path for path in _opened if path.startswith(f"{folder}/")]
        _opened = None
        for path in map(Path, paths):
            if not path.is_dir():
                name = path.relative_to(folder).as_posix()
                counts[name] = counts.get(name, 0) + 1


def pinned(value: Any, folder: Path) -> Any:
    """Return a report without what differs from run to run."""
    if isinstance(value, dict):
        return {key: HIDDEN if key in NOT_PINNED else pinned(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [pinned(each, folder) for each in value]
    return value.replace(str(folder), "") if isinstance(value, str) else value


def facts_of(kind: Kind, folder: Path) -> dict[str, Any]:
    """Return the facts of one kind of path."""
    path, options = folder / kind.path, dict(kind.options)
    facts: dict[str, Any] = {}
    if kind.digests:
        options["digests"] = folder / "made.digests.json"
        write_digests(path, options["digests"], overwrite=True, **reading(kind.options))
        facts["digests"] = sorted(json.loads(options["digests"].read_text()))
    options = reading(options)
    facts |= facts_read(path, kind, options)
    ranks = {"rank": 0, "world_size": 1, "shuffle": "sequential" if kind.grows else "global"}
    with counted_opens(folder) as opens, Loader(path, **options, **kind.shape, **ranks, prefetch=0) as loader:
        next(iter(loader))
    facts["opens"] = opens
    if not kind.grows:
        cache = folder / "cache"
        with Loader(path, **options, **kind.shape, **ranks, cache=cache) as loader:
            next(iter(loader))
        is_named_anew = facts["fingerprint"].startswith(("sampled:", "live:"))
        facts["cache"] = _names_in(cache, is_named_anew=is_named_anew)
    return without_live_id(facts)


def facts_read(path: Path | str, kind: Kind, options: dict[str, Any], orders: Sequence[str] = ORDERS) -> dict[str, Any]:
    """Return the facts that a reader, and loaders in some orders, find at a path or a URL."""
    facts: dict[str, Any] = {}
    with open_reader(path, **options, **kind.shape) as reader:
        facts["fingerprint"] = reader.fingerprint
        facts["shape"] = [reader.num_batches, reader.num_records, reader.batch_size, reader.seq_len]
    ranks = {"rank": 0, "world_size": 1}
    for order in ("sequential",) if kind.grows else orders:
        facts[order] = _order_of(lambda order=order: Loader(path, **options, **kind.shape, **ranks, shuffle=order))
    return facts


def without_live_id(facts: Any) -> Any:
    """Return facts or a report without the random id of a live store."""
    return json.loads(_LIVE_ID.sub("live:*", json.dumps(facts)))


def _order_of(make: Callable[[], Any]) -> dict[str, Any]:
    """Return the first batch of an order, a state in it, and the batches that follow the state."""
    with make() as loader:
        steps = iter(loader)
        first = golden.digests_of(islice(steps, 1))["end"]
        for _ in islice(steps, STEPS - 1):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
    with make() as loader:
        loader.load_state_dict(state)
        rest = golden.digests_of(islice(iter(loader), STEPS))["end"]
    return {"first": first, "state": state, "rest": rest}


def _names_in(cache: Path, *, is_named_anew: bool) -> list[str]:
    """Return the names of what a cache holds, and remove it; a folder that each run names otherwise is left out."""
    names = sorted(each.relative_to(cache).as_posix() for each in cache.rglob("*"))
    shutil.rmtree(cache)
    return [name.partition("/")[2] for name in names] if is_named_anew else names


#: Commands whose reports are pinned, for a path.
COMMANDS = {"info": (), "show": ("--batch", 0), "which": ("--batch", 0), "verify": ()}


def arguments_of(kind: Kind, command: str) -> list[Any]:
    """Return the options of a command about one kind of path."""
    flags: list[Any] = []
    for name, value in {**kind.options, "split": None}.items():
        if name == "field_channels":
            flags += ["--field-channel", *(f"{of}={entry}" for of, entry in value.items())]
        elif value is not None and name != "backend":
            flags += [f"--{name.replace('_', '-')}", value]
    shape = [word for name, value in kind.shape.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [*flags, *COMMANDS[command], *(shape if command in ("show", "which") else [])]


def reports_of(kind: Kind, folder: Path) -> dict[str, Any]:
    """Return the exit code and the report of each command about one kind of path."""
    found = {}
    for command in COMMANDS:
        done = run_zb(command, folder / kind.path, *arguments_of(kind, command), "--json")
        report = json.loads(done.stdout) if done.stdout else done.stderr
        if isinstance(report, dict):
            assert report.pop("version") == JSON_VERSION  # which is younger than the pins
        found[command] = [done.exit_code, pinned(report, folder)]
    return without_live_id(found)


_ROWS = ("--batch-size", 4, "--seq-len", 16)
_NEW = ("convert", "npy-to-hdf5", "records", "new", "--batch-size", 4, "--shards", 2, "--workers", 1)
_PARTS = ("convert", "npy-to-batch", "records", "parts", "--batch-size", 4, "--shards", 2, "--shard-range")
_SCORES = ("fields", "make", "h5", "scores", "--field", "score=f4/record")
_TEXT = ("convert", "jsonl-to-hdf5", "text", "dry", *_ROWS, "--tokenizer", "byte", "--dry-run")
_NOTES = ("notes.h5", "notes.h5.documents")
#: Commands whose reports are pinned, in a folder that has copies of some paths: name -> (paths, commands).
JOBS: dict[str, tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]] = {
    "repair": (("growing", "lone.batch", "lone.batch.crc32"), (
        ("repair", "growing", "--dry-run"), ("repair", "growing"), ("repair", "lone.batch"),
    )),
    "index": (("h5", "lone.batch", "flat/npy"), (
        ("index", "rebuild", "h5", "--force"), ("index", "rebuild", "h5"), ("index", "crc32", "lone.batch"),
        ("index", "digests", "npy", "-o", "digests.json"),
    )),
    "convert": (("sources/records", "sources/text", *_NOTES), (
        _NEW, (*_NEW, "--resume"), _TEXT, (*_PARTS, "0/2"), (*_PARTS, "1/2"), ("index", "merge", "parts"),
        ("convert", "stream-to-hdf5", "notes.h5", "packed", *_ROWS, "--packing", "best-fit"),
    )),
    "report": (("h5", *_NOTES), (("report", "h5", "-o", "h5.html"), ("report", "notes.h5", "-o", "notes.html"))),
    "tokenizer": (("sources/text",), (("tokenizer", "train", "text", "-o", "new.json", "--vocab-size", 300),)),
    "fields": (("h5",), (
        (*_SCORES, "--dry-run"), _SCORES, ("fields", "list", "h5"),
        *(("fields", word, "h5", "scores") for word in ("info", "verify", "finish", "release")),
        ("fields", "drop", "h5", "scores", "--yes"),
    )),
    "stage": (("h5",), (
        ("stage", "h5", "cache"), ("stage", "h5", "cache"), ("cache", "ls", "cache"), ("cache", "rm", "cache"),
    )),
    "plan": (("h5", *_NOTES), (("plan", "h5", "--ranks", 2), ("plan", "notes.h5", "--ranks", 2, *_ROWS))),
    "list": ((), (("convert", "--list"),)),
}  # fmt: skip
#: Such commands over a bucket that has the files of `FETCHED`.
SERVED: dict[str, tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]] = {
    "fetch": ((), tuple(("fetch", "s3://bucket/{}.npy", "-n", count, "-o", "new", "-w", 1) for count in (2, 3, 4))),
    "upload": (("scored",), (("fields", "upload", "scored", "scores", "s3://bucket/scores"),) * 2),
}  # fmt: skip
FETCHED = "sources/records"
#: Commands of which a report is pinned without its values: they are facts of the machine.
MEASURING: dict[str, tuple[Any, ...]] = {"doctor": ("doctor", "h5"), "bench": ("bench", "h5", "--seconds", 1)}
#: Keys of the reports of jobs whose values differ from run to run, or from machine to machine.
_OF_MACHINE = frozenset((
    "bytes", "seconds", "modified", "created", "version", "started", "host", "free", "memory_bytes", "workers",
    "total_bytes", "temp_bytes", "largest_part_bytes", "largest_shard_bytes", "num_bytes", "index_bytes",
    "opens_at_opening", "opens_per_epoch", "opens_of_all", "looks_at_opening", "opening_bytes",
    "node_opens_at_opening", "node_opens_per_epoch", "node_looks_at_opening", "node_opening_bytes",
    "tokens_per_second", "left_s", "shuffle",  # which names the part of its source that was in the page cache
))  # fmt: skip


def of_job(value: Any, folder: Path) -> Any:
    """Return a report without what differs from run to run, or from machine to machine."""
    if isinstance(value, dict):
        hidden = _OF_MACHINE | ({"value"} if value.get("how") == "measured" else set())
        return {key: HIDDEN if key in hidden else of_job(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [of_job(each, folder) for each in value]
    return value.replace(str(folder), "") if isinstance(value, str) else value


def reports_of_job(name: str, folder: Path) -> list[Any]:
    """Return the exit code and the report of each command of a job, one after the other."""
    paths, commands = {**JOBS, **SERVED}[name]
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for path in paths:
            copy = shutil.copytree if (folder / path).is_dir() else shutil.copyfile
            copy(folder / path, Path(path).name)
        found = []
        for command in commands:
            done = run_zb(*command, "--json")
            report = json.loads(done.stdout) if done.stdout else done.stderr
            if isinstance(report, dict):
                report.pop("version")
            found.append([done.exit_code, of_job(report, Path(place))])
    return without_live_id(found)


def shape_of(value: Any) -> Any:
    """Return the keys of a report, without its values."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        shapes = {json.dumps(shape_of(each)) for each in value}
        return [json.loads(shape) for shape in sorted(shapes)]
    return HIDDEN


def shape_of_report(name: str, folder: Path) -> Any:
    """Return the keys of the report of a command that measures the machine."""
    with contextlib.chdir(folder):
        return shape_of(json.loads(run_zb(*MEASURING[name], "--json").stdout))


#: Conversions whose bytes are pinned: name -> (source, target, options).
CONVERSIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "npy-to-hdf5": ("sources/records", "hdf5", {**WINDOWS, "shards": 2}),
    "npy-to-batch": ("sources/records", "batch", {**WINDOWS, "shards": 2}),
    "npy-to-stream": ("sources/long", "stream", {"boundary_token_id": 7}),
    **{f"npy-to-hdf5-{codec}": ("sources/records", "hdf5", {**WINDOWS, "codec": codec}) for codec in ("gzip", "zstd")},
    "npy-to-stream-zstd": ("sources/long", "stream", {"boundary_token_id": 7, "codec": "zstd"}),
    "hdf5-to-npy": ("h5", "npy", {}),
    "text-to-hdf5": ("sources/text", "hdf5", {"batch_size": 4, "seq_len": 32, "tokenizer": "byte"}),
    "stream-to-hdf5": ("notes.h5", "hdf5", {**WINDOWS, "packing": "best-fit"}),
    "megatron-to-hdf5": ("flat/megatron", "hdf5", {**WINDOWS, "packing": "best-fit"}),
    "megatron-to-stream": ("flat/megatron", "stream", {}),
    **{f"npy-to-{to}": ("sources/long", to, {}) for to in ("bin", "llmc")},
    **{
        f"megatron-to-{to}": ("flat/megatron", to, {"tokens_only": True} if to == "olmo" else {})
        for to in ("megatron", "datatrove", "olmo", "hf", "parquet", "mds")
    },
}


def _bytes_of(path: Path, content: bytes) -> bytes:
    """Return the bytes of a file without the time that is in the header of gzip."""
    return gzip.decompress(content) if path.suffix == ".gz" else content


def bytes_of(name: str, folder: Path) -> dict[str, str]:
    """Return the digest of each file that a conversion writes."""
    source, target, options = CONVERSIONS[name]
    out = folder / "out"
    with contextlib.chdir(folder):  # files name their sources as they were named
        convert(source, target, out, workers=1, **options)
    found = files_in(out) if out.is_dir() else {}
    if not found:  # a lone result of several files
        found = {path.name: path.read_bytes() for path in folder.glob("out*") if path.is_file()}
    if "codec" in options:
        found |= {name: _values_of(out / name) for name in found if name.endswith(".h5")}
    digests = _digests_of(found)
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return digests


def _digests_of(found: dict[str, bytes]) -> dict[str, Any]:
    """Return the digest of each file of a result, and the keys of its index."""
    digests: dict[str, Any] = {
        path: hashlib.sha256(_bytes_of(Path(path), content)).hexdigest()[:16]
        for path, content in sorted(found.items())
        if not Path(path).name.startswith(JOURNAL_PREFIX) and Path(path).name != "shards.json"
    }
    if "shards.json" in found:
        digests["shards.json"] = sorted(json.loads(found["shards.json"]))
    return digests


def _values_of(path: Path) -> bytes:
    """Return what a compressed file holds, as its digests have it: another version of a codec compresses otherwise."""
    parts = []

    def take(name: str, item: Any) -> None:
        facts = [name, {key: str(value) for key, value in sorted(item.attrs.items())}]
        if isinstance(item, h5py.Dataset):
            how = item.id.get_create_plist()
            filters = [how.get_filter(number)[0] for number in range(how.get_nfilters())]
            facts += [item.shape, str(item.dtype), item.chunks, filters]
            if not filters and not name.endswith(EXTENTS):  # which has the places of compressed chunks
                facts.append(item[()].tobytes().hex())
        parts.append(json.dumps(facts))

    with h5py.File(path) as h5:
        parts.append(json.dumps({key: str(value) for key, value in sorted(h5.attrs.items())}))
        h5.visititems(take)
    return "\n".join(parts).encode()


class Reading(Engine):
    """Reads the journal of a conversion when its work begins, and stops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, function: Any, tasks: Any, progress: Any) -> Iterator[Any]:
        for _ in tasks:
            [path] = self.folder.glob(f"out*.partial/{JOURNAL_PREFIX}*")
            self.record = read_journal(path)
            raise Stops
            yield


def plan_of(name: str, folder: Path) -> dict[str, str]:
    """Return the digest of each entry of the plan of a conversion, by which one of an earlier version goes on."""
    source, target, options = CONVERSIONS[name]
    engine = Reading(folder)
    with contextlib.chdir(folder), contextlib.suppress(Stops):  # files name their sources as they were named
        convert(source, target, folder / "out", engine=engine, **options)
    found = {"unit": engine.record.unit, **engine.record.plan}
    del found["files"]  # with the time of each
    texts = {key: json.dumps(value).replace(str(folder), "") for key, value in found.items()}
    return {key: hashlib.sha256(text.encode()).hexdigest()[:16] for key, text in texts.items()}


def cases() -> dict[str, Callable[[Path], Any]]:
    """Return every case by its name; each is called with the folder of all kinds."""
    found: dict[str, Callable[[Path], Any]] = {}
    for name, kind in kinds().items():
        found[f"facts/{name}"] = lambda folder, kind=kind: facts_of(kind, folder)
        if not kind.digests:
            found[f"reports/{name}"] = lambda folder, kind=kind: reports_of(kind, folder)
    for name in ("live", "growing"):
        found[f"bytes/{name}"] = lambda folder, name=name: _digests_of(files_in(folder / name))
    for name in JOBS:
        found[f"jobs/{name}"] = lambda folder, name=name: reports_of_job(name, folder)
    for group, name in {"shapes": "doctor", "bench": "bench"}.items():  # the latter takes seconds
        found[f"{group}/{name}"] = lambda folder, name=name: shape_of_report(name, folder)
    for name in CONVERSIONS:
        found[f"bytes/{name}"] = lambda folder, name=name: bytes_of(name, folder)
        found[f"plans/{name}"] = lambda folder, name=name: plan_of(name, folder)
    return found


def load() -> dict[str, Any]:
    """Return the pinned facts, by case."""
    return dict(json.loads(PINS.read_text())) if PINS.exists() else {}


if __name__ == "__main__":
    pins = load()
    with tempfile.TemporaryDirectory() as place:
        kinds_there = Path(place) / "kinds"
        make_kinds(kinds_there)
        for case, make in cases().items():
            if case not in pins:
                pins[case] = json.loads(json.dumps(make(kinds_there)))
        with serving_s3() as port, patch.dict(os.environ, empty_bucket(port, f"http://127.0.0.1:{port}")):
            put_files(kinds_there / FETCHED, "s3://bucket")
            for name in SERVED:
                if f"served/{name}" not in pins:
                    pins[f"served/{name}"] = reports_of_job(name, kinds_there)
    print("{", ",\n".join(f" {json.dumps(case)}: {json.dumps(facts)}" for case, facts in pins.items()), "}", sep="\n")
