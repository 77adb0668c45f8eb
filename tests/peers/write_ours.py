"""This build writes the documents of the golden files for another trainer: python write_ours.py FORMAT FOLDER."""

import json
import sys
import tempfile
from pathlib import Path

from truth import LARGE_VOCAB, SMALL_VOCAB, documents, labels, loss_mask, write_truth

from zb_hdf5 import HDF5ShardWriter, convert

#: Format -> the fields that it keeps: their dtypes, and their values for a document.
FIELDS = {
    "datatrove": {"loss_mask": ("u1", loss_mask)},
    "hf": {"loss_mask": ("u1", loss_mask), "labels": ("i4", labels)},
    "mds": {"loss_mask": ("u1", loss_mask), "labels": ("i4", labels)},
}
#: Library -> the formats that it reads, if they are several.
TARGETS = {"hf": ("hf", "parquet")}


def main(target, folder):
    """Write a folder of two shards for each vocabulary, and one with fields where the format has them."""
    for name, vocab_size in (("small", SMALL_VOCAB), ("large", LARGE_VOCAB), ("loss", SMALL_VOCAB)):
        has_loss = name == "loss"
        if has_loss and not FIELDS.get(target):
            continue
        made_of = FIELDS[target] if has_loss else {}
        found = documents(vocab_size)
        how = {"dtype": "uint32", "vocab_size": vocab_size, "tokenizer": json.dumps({"name": "made-up/tokenizer"})}
        with tempfile.TemporaryDirectory() as made:
            for number in range(2):
                fields = {each: dtype for each, (dtype, _) in made_of.items()} or None
                with HDF5ShardWriter(Path(made, f"{number}.h5"), fields=fields, **how) as writer:
                    for document in found[number * 25 :][: 25 + 10 * number]:
                        values = {each: make(document) for each, (_, make) in made_of.items()}
                        writer.write_document(document, values or None)
            for each in TARGETS.get(target, (target,)):
                place = folder / (name if each == target else f"{name}-{each}")
                convert(sorted(Path(made).iterdir()), each, place, workers=1)
                write_truth(place, found, vocab_size=vocab_size, loss=has_loss)


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True)
    main(sys.argv[1], Path(sys.argv[2]))
