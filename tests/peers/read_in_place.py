"""Reads the files of a peer in place, in the environment of the peer: python read_in_place.py FOLDER."""

import json
import sys
from pathlib import Path

import numpy as np
from truth import digest, loss_mask

from zb_hdf5 import FormatError, ReadAs, open_corpus


def check(folder):
    """Compare the ids and the documents of a folder with what its writer was given."""
    truth = json.loads((folder / "truth.json").read_text())
    with open_corpus(folder, read_as=ReadAs(source_dtype=truth.get("source_dtype"))) as stream:
        tokens = stream.tokens[0 : stream.num_tokens]
        lengths = np.diff(stream.doc_offsets).tolist()
        masks = [stream.field(field.name).tokens[0 : stream.num_tokens] for field in stream.fields]
    if lengths != truth["lengths"] or digest([tokens]) != truth["sha256"]:
        sys.exit(f"{folder}: other ids or documents")
    expected = [np.concatenate([loss_mask(range(length)) for length in lengths])] if truth.get("loss") else []
    if len(masks) != len(expected) or not all(map(np.array_equal, masks, expected)):
        sys.exit(f"{folder}: another loss mask")
    print(f"{folder.name}: {len(tokens):,} ids in {len(lengths)} documents, as they were written")


for found in sorted(Path(sys.argv[1]).iterdir()):
    if (found / "truth.json").exists():
        check(found)
        continue
    try:
        open_corpus(found)
    except FormatError as error:
        print(f"{found.name}: refused: {error}")
    else:
        sys.exit(f"{found}: expected to be refused")
