"""Converts the files of a peer that are not read in place: python read_converted.py FORMAT FOLDER.

Each data set becomes a stream, whose ids, documents and fields are compared with what its writer was given.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from truth import digest, documents, labels, loss_mask

from zb_hdf5 import convert, open_corpus

#: Format -> the data sets of its folder, their truth, and the options of each.
DATA_SETS = {
    "hf": {"saved": {}, "corpus.parquet": {}},
    "mds": {"ndarray": {}, "zstd": {}, "bytes": {"source_dtype": "int64"}},
    "litdata": {"tensor": {}, "array": {}},
}
FIELDS = {"labels": labels, "loss_mask": loss_mask, "attention_mask": np.ones_like}


def check(path, truth, options, target):
    """Compare a data set with its truth."""
    with tempfile.TemporaryDirectory() as made:
        convert(path, "stream", Path(made, "stream"), source_format=target, workers=1, **options)
        with open_corpus(Path(made, "stream")) as stream:
            tokens = stream.tokens[0 : stream.num_tokens]
            lengths = np.diff(stream.doc_offsets).tolist()
            fields = {field.name: stream.field(field.name).tokens[0 : len(tokens)] for field in stream.meta.fields}
    if lengths != truth["lengths"] or digest([tokens]) != truth["sha256"]:
        sys.exit(f"{path}: other ids or documents")
    for name, values in fields.items():
        expected = [FIELDS[name](document) for document in documents(truth["vocab_size"])]
        if not np.array_equal(values, np.concatenate(expected)):
            sys.exit(f"{path}: other {name}")
    print(
        f"{path.name}: {len(tokens):,} ids in {len(lengths)} documents with {len(fields)} fields, as they were written"
    )


if __name__ == "__main__":
    for name, options in DATA_SETS[sys.argv[1]].items():
        path = Path(sys.argv[2], name)
        place = path if (path / "truth.json").exists() else path.parent
        check(path, json.loads((place / "truth.json").read_text()), options, sys.argv[1])
