"""litdata: chunks of `optimize` for its `TokensLoader`, of tensors and of arrays, without headers."""

import sys
from functools import partial
from pathlib import Path

import torch
from litdata import TokensLoader, optimize
from truth import LARGE_VOCAB, SMALL_VOCAB, documents, write_truth


def item(number, vocab_size, as_tensor, dtype):
    """Yield one document."""
    ids = documents(vocab_size, allow_empty=False)[number].astype(dtype)
    yield torch.from_numpy(ids) if as_tensor else ids


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, vocab_size, as_tensor, dtype in (
        ("tensor", LARGE_VOCAB, True, "int32"),
        ("array", SMALL_VOCAB, False, "uint16"),
    ):
        found = documents(vocab_size, allow_empty=False)
        optimize(
            partial(item, vocab_size=vocab_size, as_tensor=as_tensor, dtype=dtype),
            list(range(len(found))),
            str(folder / name),
            chunk_size=8_000,
            item_loader=TokensLoader(),
            num_workers=1,
        )
        write_truth(folder / name, found, vocab_size=vocab_size, dtype=dtype)
