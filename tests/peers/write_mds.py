"""MosaicML streaming: MDS shards by `MDSWriter`, raw and zstd, arrays and bytes of ids."""

import sys
from pathlib import Path

import numpy as np
import torch

# torchvision of the index is built for torch with CUDA: beside the build for CPUs its operators are missing, and its
# import fails at these two. Nothing here uses them.
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter  # noqa: E402
from truth import LARGE_VOCAB, SMALL_VOCAB, documents, write_truth  # noqa: E402

folder = Path(sys.argv[1])
for name, encoding, vocab_size, compression in (
    ("ndarray", "ndarray:int32", LARGE_VOCAB, None),
    ("zstd", "ndarray:uint16", SMALL_VOCAB, "zstd:7"),
    ("bytes", "bytes", SMALL_VOCAB, None),
):
    found = documents(vocab_size, allow_empty=False)
    dtype = np.int64 if encoding == "bytes" else np.dtype(encoding.split(":")[1])
    how = {"out": str(folder / name), "columns": {"tokens": encoding}, "compression": compression, "size_limit": 40_000}
    with MDSWriter(**how, hashes=["sha1"]) as out:
        for document in found:
            ids = document.astype(dtype)
            out.write({"tokens": ids.tobytes() if encoding == "bytes" else ids})
    write_truth(folder / name, found, vocab_size=vocab_size, dtype=np.dtype(dtype).name)
