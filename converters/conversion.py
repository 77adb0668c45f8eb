"""`convert(...)`: a conversion from Python, with the options of the command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final

from zb_hdf5 import ArgumentError
from zb_hdf5.columns.reader import require_choice
from zb_hdf5.converters import run
from zb_hdf5.converters.engines import default_workers, open_engine, require_own_workers
from zb_hdf5.converters.journal import WHOLE, Part
from zb_hdf5.converters.npy_source import NpySource
from zb_hdf5.converters.packed import PackOptions
from zb_hdf5.converters.relaid_source import open_store
from zb_hdf5.converters.shuffle import DEFAULT_MEMORY_BYTES, require_memory
from zb_hdf5.converters.source import Source
from zb_hdf5.converters.stream_source import open_stream
from zb_hdf5.converters.task import Progress, no_progress
from zb_hdf5.files.paths import any_path, is_url, local_path
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import INDEX_NAME, codec_named
from zb_hdf5.store.opening import is_stream

SOURCE_FORMATS: Final = tuple(name for name, row in FORMATS.items() if row.as_source)
#: The source format of an HDF5 stream of documents.
STREAM: Final = "stream"
#: Less than this is written by one process: starting others takes longer.
SMALL_BYTES: Final = 256 << 20
#: Memory that makes a worker worth its while.
WORKER_BYTES: Final = 192 << 20


def convert(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str,
    destination: str | os.PathLike[str],
    *,
    source_format: str = "auto",
    batch_size: int | None = None,
    seq_len: int | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    packing: str | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    remainder: str | None = None,
    pad_id: int | None = None,
    dataset: str | None = None,
    num_shards: int | None = None,
    shard_bytes: int | None = None,
    workers: int | None = None,
    executor: str = "local",
    scheduler_file: str | os.PathLike[str] | None = None,
    part: tuple[int, int] | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    shuffle_method: str = "auto",
    codec: str | None = None,
    tokens_only: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress = no_progress,
) -> run.Report | None:
    """Convert tokens to another format, as `zb convert` does.

    Parameters
    ----------
    source
        Of `.npy` files one or more, or folders of them; else one file, store or URL, of batches or of streams.
    target
        "hdf5", "batch" or "npy".
    destination
        One file if it ends in the format's suffix, else a folder of shards, of this machine or in a bucket: such a
        store is written to `<its name>.upload` in the current folder, uploaded with its index last, and removed there.
    source_format
        "npy", "hdf5", "batch", or "stream": an HDF5 stream of documents, to be packed; "auto": what the first file is.
    batch_size, seq_len, shuffle, seed, remainder, pad_id, vocab_size
        Of `.npy` sources and streams, which are no batches. By default 32, the length of 2-D records or else 512,
        True, 42, "drop", 0 and unknown; of a stream the remainder is "pad", `pad_id` its boundary token, and the
        vocabulary its own. Of a store `batch_size`, a `seq_len` that divides the stored one, and `remainder` change
        the layout of its batches.
    packing
        How the documents of a stream become rows: "concat" (the default), "best-fit" or "pad".
    dtype
        "uint16" or "uint32". None: what fits, from `.npy` files to HDF5; uint32 in `.batch`; else as it is.
    dataset
        Name of a 3-D dataset in an HDF5 file of another origin.
    num_shards, shard_bytes
        How to cut a folder into shards; by default as the source is cut, or into shards of 1 GiB.
    workers, executor, scheduler_file
        Local processes, by default the cores, or 1 for little data; or "mpi", or "dask" and the file of its scheduler.
    part
        (i, n): the i-th of n parts only; then `zb index merge`.
    memory_bytes, shuffle_method
        What all processes of this node may take together, and how shuffled records are read.
    codec
        "zstd" or "gzip", with a level behind a colon, to compress what is written; HDF5 only.
    tokens_only
        Leave fields and documents behind: a `.batch` store holds tokens only, and to lose them is an error otherwise.
    overwrite
        Replace what exists, at the end and whole.
    resume
        Keep the finished shards of an interrupted conversion of the same arguments, and do the rest.
    progress
        Called with the number of tokens written since the last call.

    Returns
    -------
    Report or None
        What was done; None in an MPI rank that has only served the first one.

    Raises
    ------
    ExistsError
        If the destination exists.
    ConvertError
        If there is no room for it, or the source cannot be converted as asked.
    ArgumentError
        If the arguments contradict each other.

    Examples
    --------
    >>> report = convert("tokens", "hdf5", "train-h5", batch_size=32, seq_len=512)  # doctest: +SKIP
    """
    require_choice("target", target, tuple(FORMATS))
    require_choice("source_format", source_format, ("auto", *SOURCE_FORMATS, STREAM))
    require_own_workers(executor, workers)
    _require_positive(
        batch_size=batch_size, seq_len=seq_len, num_shards=num_shards, shard_bytes=shard_bytes, workers=workers,
        memory_bytes=memory_bytes,
    )  # fmt: skip
    if part is not None and not 0 <= part[0] < part[1]:
        raise ArgumentError(f"part must be (i, n) with i from 0 to n - 1, found {part}")
    stored_codec = codec_named(codec)
    given_paths = [source] if isinstance(source, str | os.PathLike) else source
    paths = [any_path(each) for each in given_paths]
    if not paths:
        raise ArgumentError("source: expected one path or more, found none")
    kind = _format_of(paths[0], dataset) if source_format == "auto" else source_format
    records = {
        "batch_size": batch_size, "seq_len": seq_len, "shuffle": shuffle, "seed": seed, "vocab_size": vocab_size,
        "remainder": remainder, "pad_id": pad_id, "packing": packing,
    }  # fmt: skip
    given = {name: value for name, value in records.items() if value is not None}
    shards = {"num_shards": num_shards, "shard_bytes": shard_bytes}
    destination, job = any_path(destination), Part(*part) if part else WHOLE

    def open_source() -> Source:
        if kind == STREAM:
            opened = stack.enter_context(_open_stream(paths, target, destination, dtype, job, {**given, **shards}))
        elif kind in FORMATS and not FORMATS[kind].holds_batches:
            opened = _open_npy(paths, target, dtype, dataset, given)
        else:
            opened = _open_store(paths, kind, dtype, dataset, given)
        FORMATS[target].require(opened.meta, destination)  # before any work
        return opened

    with ExitStack() as stack:
        opened = None if executor == "mpi" else open_source()  # of MPI ranks only the first one needs it
        num_workers = workers or (1 if opened is None else workers_of(opened, memory_bytes))
        engine = stack.enter_context(
            open_engine(executor, num_workers, Path(scheduler_file) if scheduler_file else None)
        )
        if engine is None:
            return None
        opened = opened or open_source()
        if opened.order is not None:
            one_file = destination.suffix == FORMATS[target].suffix  # written by this process alone
            require_memory(memory_bytes, 1 if one_file else engine.workers_per_node, opened.meta.batch_bytes)
        return run.convert(
            opened, target, destination, num_shards=None if kind == STREAM else num_shards,
            shard_bytes=None if kind == STREAM else shard_bytes, overwrite=overwrite, resume=resume, part=job,
            engine=engine, shuffle_method=shuffle_method, memory_bytes=memory_bytes, codec=stored_codec,
            tokens_only=tokens_only, progress=progress,
        )  # fmt: skip


def _require_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ArgumentError(f"{name} must be at least 1, found {size}")


def _open_stream(
    paths: list[Path], target: str, destination: Path, dtype: str | None, part: Part, given: Mapping[str, object]
) -> AbstractContextManager[Source]:
    if len(paths) > 1 or "vocab_size" in given:
        raise ArgumentError(
            f"{paths[0]}: expected one stream, which has its own vocab_size, found {len(paths)} sources"
        )
    for path in (paths[0], destination):
        local_path(path)  # the plan of the rows lies beside them
    options = PackOptions(**{"batch_size": 32, "seq_len": 512, **given})  # type: ignore[arg-type]
    return open_stream(paths[0], target, destination, options, dtype or "keep", part)


def _open_npy(
    paths: list[Path], target: str, dtype: str | None, dataset: str | None, given: Mapping[str, object]
) -> Source:
    if dataset is not None:
        raise ArgumentError("dataset: belongs to an HDF5 source, found .npy files")
    if "packing" in given:
        raise ArgumentError(f"{paths[0]}: packing belongs to streams of documents, found .npy files")
    options: dict[str, object] = {"batch_size": 32, "seed": 42, **given}
    options["dtype"] = dtype or FORMATS[target].default_dtype
    return NpySource(paths, **options)  # type: ignore[arg-type]


def _open_store(
    paths: list[Path], kind: str, dtype: str | None, dataset: str | None, given: Mapping[str, object]
) -> Source:
    if len(paths) > 1:
        raise ArgumentError(f"source: expected one {kind} file or store, found {len(paths)}")
    layout = {name: given[name] for name in ("batch_size", "seq_len", "remainder") if name in given}
    if other := given.keys() - layout.keys():
        raise ArgumentError(
            f"{paths[0]}: {', '.join(sorted(other))} belong to .npy files and streams: records stay as they are stored"
        )
    return open_store(paths[0], kind, dataset, dtype or "keep", **layout)  # type: ignore[arg-type]


def _format_of(path: Path, dataset: str | None) -> str:
    """Return the format of a source: by its suffix where the files do not say, else "auto"."""
    for name in SOURCE_FORMATS:
        if not FORMATS[name].holds_batches and (
            path.suffix == FORMATS[name].suffix or _holds(path, FORMATS[name].suffix)
        ):
            return name
    return STREAM if dataset is None and is_stream(path) else "auto"


def _holds(folder: Path, suffix: str) -> bool:
    """Return whether a folder holds files of this suffix. Folders inside it count too, but not those inside a store."""
    if is_url(folder) or not folder.is_dir():
        return False
    return any(folder.glob(f"*{suffix}" if (folder / INDEX_NAME).exists() else f"**/*{suffix}"))


def workers_of(source: Source, memory_bytes: int) -> int:
    """Return how many local processes a conversion is worth."""
    if source.num_batches * source.meta.batch_bytes < SMALL_BYTES:
        return 1
    return max(1, min(default_workers(), memory_bytes // WORKER_BYTES))
