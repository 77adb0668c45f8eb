"""MosaicML streaming reads the files that this build has written: python read_mds.py FOLDER."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

# torchvision of the index is built for torch with CUDA: beside the build for CPUs its operators are missing, and its
# import fails at these two. Nothing here uses them.
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import LocalDataset  # noqa: E402
from truth import digest, documents, labels, loss_mask  # noqa: E402

for folder in sorted(Path(sys.argv[1]).iterdir()):
    truth = json.loads((folder / "truth.json").read_text())
    dataset = LocalDataset(str(folder))
    samples = [dataset[number] for number in range(len(dataset))]
    rows = [sample["tokens"] for sample in samples]
    dtype = "uint16" if truth["vocab_size"] <= 2**16 else "int32"
    if {row.dtype.name for row in rows} != {dtype}:
        sys.exit(f"{folder}: streaming reads ids of other dtypes")
    if [len(row) for row in rows] != truth["lengths"] or digest(rows) != truth["sha256"]:
        sys.exit(f"{folder}: streaming reads other samples")
    for name, make in (("labels", labels), ("loss_mask", loss_mask)):
        expected = [make(document) for document in documents(truth["vocab_size"])]
        pairs = zip(samples, expected, strict=True)
        if truth["loss"] and not all(np.array_equal(sample[name], values) for sample, values in pairs):
            sys.exit(f"{folder}: streaming reads other {name}")
    print(f"{folder.name}: streaming reads {len(rows)} samples, as they were written")
