"""Megatron-LM reads the files that this build has written: python read_megatron.py FOLDER."""

import json
import sys
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from truth import digest

for folder in sorted(Path(sys.argv[1]).iterdir()):
    truth = json.loads((folder / "truth.json").read_text())
    found = []
    for index in sorted(folder.glob("*.idx")):
        dataset = IndexedDataset(str(index.with_suffix("")))
        if dataset.index.dtype != DType.optimal_dtype(truth["vocab_size"]):
            sys.exit(f"{index}: other dtype: {dataset.index.dtype}")
        edges = dataset.document_indices.tolist()
        for first, stop in zip(edges, edges[1:], strict=False):  # noqa: RUF007
            parts = [dataset[number] for number in range(first, stop)]
            found.append(np.concatenate([np.empty(0, np.int64), *parts]))
    if [len(document) for document in found] != truth["lengths"] or digest(found) != truth["sha256"]:
        sys.exit(f"{folder}: Megatron reads other documents")
    print(f"{folder.name}: Megatron reads {len(found)} documents, as they were written")
