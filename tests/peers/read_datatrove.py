"""datatrove reads the files that this build has written: python read_datatrove.py FOLDER.

Its merger reads the ids, the ends of documents, the loss masks and the metadata of all files, and makes one file of
them; its data set reads the ids and their positions in documents.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from datatrove.pipeline.tokens.merger import DocumentTokenizerMerger
from datatrove.utils.dataset import DatatroveFolderDataset
from truth import digest, documents, loss_mask

SEQ_LEN = 100

for folder in sorted(Path(sys.argv[1]).iterdir()):
    truth = json.loads((folder / "truth.json").read_text())
    token_size = 2 if truth["vocab_size"] <= 2**16 else 4
    with tempfile.TemporaryDirectory() as made:
        options = {"shuffle": False, "save_loss_metadata": truth["loss"], "progress": False}
        DocumentTokenizerMerger(str(folder), made, "merged", **options).run()
        [merged] = Path(made).glob("*.ds")
        tokens = np.fromfile(merged, f"<u{token_size}")
        ends = np.fromfile(f"{merged}.index", "<u8")
        metadata = Path(f"{merged}.metadata").read_text().splitlines()
        loss = np.fromfile(f"{merged}.loss", "u1") if truth["loss"] else None
    lengths = np.diff(ends, prepend=np.uint64(0)).tolist()
    if lengths != truth["lengths"] or digest([tokens]) != truth["sha256"]:
        sys.exit(f"{folder}: datatrove reads other documents")
    if metadata[0] != f"made-up/tokenizer|{token_size}":
        sys.exit(f"{folder}: datatrove reads another tokenizer: {metadata[0]}")
    expected = np.concatenate([loss_mask(document) for document in documents(truth["vocab_size"])])
    if loss is not None and not np.array_equal(loss, expected):
        sys.exit(f"{folder}: datatrove reads another loss mask")
    windows = DatatroveFolderDataset(str(folder), SEQ_LEN, token_size=token_size)
    if not np.array_equal(windows[0]["input_ids"][: SEQ_LEN + 1].numpy(), tokens[: SEQ_LEN + 1].astype(np.int64)):
        sys.exit(f"{folder}: datatrove reads another window")
    print(f"{folder.name}: datatrove reads {len(lengths)} documents, as they were written")
