"""datasets reads the files that this build has written: python read_hf.py FOLDER.

A folder of the format "hf" opens by `load_from_disk`, one of Parquet files by `load_dataset`.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from datasets import load_dataset, load_from_disk
from truth import digest, documents, labels, loss_mask

for folder in sorted(Path(sys.argv[1]).iterdir()):
    truth = json.loads((folder / "truth.json").read_text())
    with tempfile.TemporaryDirectory() as cache:
        if (folder / "state.json").exists():
            found = load_from_disk(str(folder))
        else:
            found = load_dataset("parquet", data_files=str(folder / "*.parquet"), cache_dir=cache, split="train")
        rows = [np.array(row, np.int64) for row in found["input_ids"]]
        fields = {name: found[name] for name in ("labels", "loss_mask") if name in found.column_names}
    if [len(row) for row in rows] != truth["lengths"] or digest(rows) != truth["sha256"]:
        sys.exit(f"{folder}: datasets reads other rows")
    for name, make in (("labels", labels), ("loss_mask", loss_mask)):
        expected = [make(document).tolist() for document in documents(truth["vocab_size"])]
        if name in fields and fields[name][:] != expected:
            sys.exit(f"{folder}: datasets reads other {name}")
    if len(fields) != (2 if truth["loss"] else 0):
        sys.exit(f"{folder}: datasets reads the columns {found.column_names}")
    print(f"{folder.name}: datasets reads {len(rows)} rows with {len(fields)} fields, as they were written")
