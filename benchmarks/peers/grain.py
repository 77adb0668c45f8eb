"""grain and array_record: records that are rows, or whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grain.python as grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks import measure as m
from benchmarks.peers import source

LIBRARY = "grain, array_record"
PACKAGES = ("grain", "array_record")


def prepare(folder: Path) -> None:
    tokens = source(folder)
    for name, items in (("rows", tokens), ("batches", tokens.reshape(-1, m.BATCH_TOKENS))):
        writer = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
        for item in items:
            writer.write(item.tobytes())
        writer.close()


def _decoded(record: bytes) -> np.ndarray:
    return np.frombuffer(record, np.uint32).astype(np.int64)


def read(folder: Path, name: str, options: grain.ReadOptions) -> m.Epochs:
    data = grain.ArrayRecordDataSource(str(folder / f"{name}.array_record"))

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        found = grain.MapDataset.source(data).shuffle(seed=epoch).map(_decoded)
        if name == "rows":
            found = found.batch(m.BATCH_SIZE)
        for item in found.to_iter_dataset(options):
            yield torch.from_numpy(item).view(m.BATCH_SIZE, m.SEQ_LEN)

    return epoch_of


DEFAULT = grain.ReadOptions()
IN_THIS_THREAD = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
BATCHES: dict[str, Callable[[Path], m.Epochs]] = {
    "grain": lambda f: read(f, "batches", DEFAULT),
    "grain, num_threads=0": lambda f: read(f, "batches", IN_THIS_THREAD),
}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "grain, a row each, num_threads=0": lambda f: read(f, "rows", IN_THIS_THREAD)
}
