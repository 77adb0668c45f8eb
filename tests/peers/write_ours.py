"""This build writes the documents of the golden files for another trainer: python write_ours.py FORMAT FOLDER."""

import json
import sys
import tempfile
from pathlib import Path

from truth import LARGE_VOCAB, SMALL_VOCAB, documents, loss_mask, write_truth

from zb_hdf5 import HDF5ShardWriter, convert


def main(target, folder):
    """Write a folder of two shards for each vocabulary, and one with a loss mask where the format has it."""
    for name, vocab_size in (("small", SMALL_VOCAB), ("large", LARGE_VOCAB), ("loss", SMALL_VOCAB)):
        has_loss = name == "loss"
        if has_loss and target != "datatrove":
            continue
        found = documents(vocab_size)
        how = {"dtype": "uint32", "vocab_size": vocab_size, "tokenizer": json.dumps({"name": "made-up/tokenizer"})}
        with tempfile.TemporaryDirectory() as made:
            for number in range(2):
                fields = {"loss_mask": "u1"} if has_loss else None
                with HDF5ShardWriter(Path(made, f"{number}.h5"), fields=fields, **how) as writer:
                    for document in found[number * 25 :][: 25 + 10 * number]:
                        writer.write_document(document, {"loss_mask": loss_mask(document)} if has_loss else None)
            convert(sorted(Path(made).iterdir()), target, folder / name, workers=1)
        write_truth(folder / name, found, vocab_size=vocab_size, loss=has_loss)


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True)
    main(sys.argv[1], Path(sys.argv[2]))
