"""The documents that each peer's own library wrote into the golden files: the same ids, whatever the format."""

import hashlib
import json
from pathlib import Path

import numpy as np

#: Lengths of the first documents; the others are drawn. Zero and one are those that readers get wrong.
FIRST_LENGTHS = (5, 1, 130, 0, 64)
NUM_DOCUMENTS = 60
#: Ids end below these: the first fits uint16, the second does not.
SMALL_VOCAB = 50_257
LARGE_VOCAB = 128_000


def documents(vocab_size, allow_empty=True):
    """Return the documents, as int64 arrays: the same ones in every version of NumPy, whose RandomState is frozen."""
    draws = np.random.RandomState(29)
    lengths = [*FIRST_LENGTHS, *draws.randint(1, 700, NUM_DOCUMENTS - len(FIRST_LENGTHS)).tolist()]
    if not allow_empty:
        lengths = [length or 3 for length in lengths]
    return [draws.randint(0, vocab_size, length).astype(np.int64) for length in lengths]


def loss_mask(document):
    """Return a mask of the tokens of a document: 1 where the model is trained."""
    return (np.arange(len(document)) % 3 != 0).astype(np.uint8)


def labels(document):
    """Return the targets of a document's own tokens, -100 where none is trained."""
    return np.where(loss_mask(document) == 1, document, -100)


def digest(documents):
    """Return the sha256 of the ids of documents, as int64, one after the other."""
    found = hashlib.sha256()
    for document in documents:
        found.update(np.ascontiguousarray(document, np.int64))
    return found.hexdigest()


def write_truth(folder, documents, **facts):
    """Write what a reader has to find in the files of a folder."""
    truth = {"lengths": [len(document) for document in documents], "sha256": digest(documents), **facts}
    Path(folder, "truth.json").write_text(json.dumps(truth) + "\n")
