"""This build reads what another HDF5 has written or copied: python read_hdf5_back.py FOLDER.

FOLDER/files has files of h5py by itself, FOLDER/copies those of this build in the format of another HDF5, and
FOLDER/ours these files themselves.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from h5_contents import contents
from truth import LARGE_VOCAB, SMALL_VOCAB, digest, documents, loss_mask

from zb_hdf5 import ReadAs, convert, open_corpus, open_reader, verify_store


def check_records(path, layouts, found):
    """Compare the rows of each layout, and their mask, with the documents that they were cut from."""
    ids = np.concatenate(found)
    masks = np.concatenate([loss_mask(document) for document in found])
    rows = len(ids) // 64
    for layout in layouts:
        with open_reader(path, batch_size=1, read_as=ReadAs(dataset=f"{layout}/input_ids")) as reader:
            tokens = np.concatenate([reader.read_batch(number) for number in range(reader.num_batches)])
            mask = reader.field("loss_mask")
            read = np.concatenate([mask.read_batch(number) for number in range(reader.num_batches)])
        if not np.array_equal(tokens.ravel(), ids[: rows * 64]) or not np.array_equal(read.ravel(), masks[: rows * 64]):
            sys.exit(f"{path}: {layout}: other ids or another mask")


def check_documents(path, found):
    """Compare the documents of a conversion with those that were written."""
    with tempfile.TemporaryDirectory() as made:
        options = {"dataset": "documents/input_ids", "offsets": "documents/doc_offsets"}
        convert(path, "stream", Path(made, "stream"), workers=1, **options)
        with open_corpus(Path(made, "stream")) as stream:
            lengths = np.diff(stream.doc_offsets).tolist()
            tokens = stream.tokens[0 : stream.num_tokens]
    if lengths != [len(document) for document in found] or digest([tokens]) != digest(found):
        sys.exit(f"{path}: other documents")


def check_copy(path, expected):
    """Compare a copy of a file of this build with what was written, and with the digests in it."""
    if contents(path) != expected:
        sys.exit(f"{path}: other contents")
    if path.suffix == ".h5":
        problems = [report.problem for report in verify_store(path)]
        if problems != [None]:
            sys.exit(f"{path}: {problems}")


folder = Path(sys.argv[1])
if (folder / "files").exists():
    truth = json.loads((folder / "files" / "truth.json").read_text())
    paths = sorted((folder / "files").glob("*.h5"))
    for path in paths:
        found = documents(SMALL_VOCAB if path.stem.endswith("u2") else LARGE_VOCAB)
        check_records(path, truth["layouts"], found)
        check_documents(path, found)
    print(f"this build reads all {len(paths)} files of HDF5 {truth['hdf5']}, {len(truth['layouts'])} layouts in each")
copies = folder / "copies"
if copies.exists():
    expected = json.loads((folder / "ours" / "contents.json").read_text())
    for name, each in expected.items():
        check_copy(copies / name, each)
    print(f"this build reads all {len(expected)} copies of its files")
