"""OLMo and dolma: headerless `.npy` files with `.csv.gz`, by dolma's `MemmapWriter`."""

import sys
from pathlib import Path

import numpy as np
from dolma.tokenizer.data_types import TokenizerOutput
from dolma.tokenizer.memmap_writer import MemmapWriter
from truth import LARGE_VOCAB, SMALL_VOCAB, documents, write_truth

folder = Path(sys.argv[1])
for name, vocab_size in (("uint16", SMALL_VOCAB), ("uint32", LARGE_VOCAB)):
    found = documents(vocab_size)
    rows = [
        TokenizerOutput.from_tokens(f'a "name", {number}', "part,\n0.json.gz", number, document.tolist())
        for number, document in enumerate(found)
    ]
    with MemmapWriter(str(folder / name / "part-0-00000.npy"), np.dtype(name), max_tokens=1 << 20) as writer:
        if writer.write_many(rows):
            sys.exit("not all documents were written")
    write_truth(folder / name, found, vocab_size=vocab_size, source_dtype=name)
