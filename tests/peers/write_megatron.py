"""Megatron-LM: `.bin` and `.idx` by `megatron.core`, with documents of one and of several sequences, and modes."""

import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from truth import LARGE_VOCAB, SMALL_VOCAB, documents, write_truth


def write(prefix, found, dtype, sentences=1, multimodal=False):
    """Write documents, each as a number of sequences."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for document in found:
        for part in np.array_split(document, sentences):
            builder.add_item(torch.from_numpy(part.copy()))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


folder = Path(sys.argv[1])
for name, vocab_size, dtype, sentences in (
    ("uint16", SMALL_VOCAB, DType.optimal_dtype(SMALL_VOCAB), 1),
    ("int32", LARGE_VOCAB, DType.optimal_dtype(LARGE_VOCAB), 1),
    ("sentences", SMALL_VOCAB, np.uint16, 3),
):
    (folder / name).mkdir(parents=True)
    found = documents(vocab_size)
    write(folder / name / "corpus_text_document", found, dtype, sentences)
    write_truth(folder / name, found, vocab_size=vocab_size, sequences=len(found) * sentences)
(folder / "multimodal").mkdir()
write(folder / "multimodal" / "corpus", documents(SMALL_VOCAB)[:3], np.uint16, multimodal=True)
