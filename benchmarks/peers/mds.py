"""mosaicml-streaming: MDS shards of rows and of whole batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

# torchvision of the index is built for torch with CUDA: beside the build for CPUs its operators are missing, and its
# import fails at these two. Nothing here uses them.
operators = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):  # it is there
        operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataset  # noqa: E402

from benchmarks import measure as m  # noqa: E402
from benchmarks.peers import source  # noqa: E402

LIBRARY = "Streaming (MosaicML)"
PACKAGES = ("mosaicml-streaming", "torch")
#: With fewer samples looked ahead, the thread that does sleeps between them.
LOOK_AHEAD = 1_000_000


def prepare(folder: Path) -> None:
    tokens = source(folder).view(np.int32)
    shape = (m.BATCH_SIZE, m.SEQ_LEN)
    for name, items in (("rows", tokens), ("batches", tokens.reshape(-1, *shape))):
        encoding = f"ndarray:int32:{','.join(map(str, items.shape[1:]))}"
        with MDSWriter(out=str(folder / f"mds-{name}"), columns={"tokens": encoding}) as writer:
            for item in items:
                writer.write({"tokens": item})


def read(folder: Path, name: str, batch_size: int | None, **options: Any) -> m.Epochs:
    path = str(folder / f"mds-{name}")
    found = StreamingDataset(local=path, shuffle=True, batch_size=batch_size or 1, **options)
    loader: DataLoader[Any] = DataLoader(found, batch_size=batch_size)
    return lambda epoch: (torch.as_tensor(item["tokens"]).long() for item in loader)


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {
    "Streaming": lambda f: read(f, "batches", None),
    "Streaming, predownload": lambda f: read(f, "batches", None, predownload=LOOK_AHEAD),
}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    # Without a look ahead, three passes of a row each take two minutes: "Streaming" above has that setting.
    "Streaming, a row each, predownload": lambda f: read(f, "rows", m.BATCH_SIZE, predownload=LOOK_AHEAD),
}
