"""The documents of a source, one by one, and those that the golden files hold."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

GOLDEN = Path(__file__).parents[1] / "data" / "trainers"


class Documents(NamedTuple):
    """The ids, fields, rows, ids and metadata of documents, in order."""

    tokens: list
    fields: dict
    rows: list
    ids: list
    metadata: list

    @property
    def sha256(self):
        """The digest of `truth.json`."""
        return hashlib.sha256(np.concatenate([np.empty(0, np.int64), *self.tokens]).astype(np.int64)).hexdigest()


def documents_of(source, groups=None, choose=None):
    """Read some groups of a source, or all."""
    found = Documents([], {field.name: [] for field in source.fields}, [], [], [])
    for group in source.groups if groups is None else groups:
        read = 0
        for encoded in source.read(group, choose, 1):
            assert len(encoded.tokens) == encoded.lengths.sum()
            assert len(encoded.lengths) == len(encoded.rows)
            assert encoded.read >= read
            read = encoded.read
            cuts = np.cumsum(encoded.lengths)[:-1]
            found.tokens.extend(each.tolist() for each in np.split(encoded.tokens, cuts))
            for field in source.fields:
                values = encoded.fields[field.name]
                assert values.dtype == field.dtype
                found.fields[field.name].extend(each.tolist() for each in np.split(values, cuts))
            found.rows.extend(encoded.rows.tolist())
            found.ids.extend(encoded.ids or [])
            found.metadata.extend(map(json.loads, encoded.metadata or []))
    return found


def truth_of(folder):
    """Return the digest and the lengths of the documents in a golden folder."""
    truth = json.loads((folder / "truth.json").read_text())
    return truth["sha256"], truth["lengths"]


def loss_mask_of(documents):
    """Return the mask that the writers of the golden files gave each document."""
    return [(np.arange(len(each)) % 3 != 0).astype(int).tolist() for each in documents]


def labels_of(documents):
    """Return the labels that the writers of the golden files gave each document."""
    masks = loss_mask_of(documents)
    return [
        [token if kept else -100 for token, kept in zip(*pair, strict=True)]
        for pair in zip(documents, masks, strict=True)
    ]
