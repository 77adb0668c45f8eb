"""datatrove: `.ds` files with `.ds.index`, `.ds.metadata` and `.ds.loss`, by its `TokenizedFile`."""

import sys
from pathlib import Path

from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from truth import LARGE_VOCAB, SMALL_VOCAB, documents, loss_mask, write_truth

folder = Path(sys.argv[1])
for name, vocab_size, token_size, with_loss in (
    ("uint16", SMALL_VOCAB, 2, False),
    ("uint32", LARGE_VOCAB, 4, False),
    ("loss", SMALL_VOCAB, 2, True),
):
    (folder / name).mkdir(parents=True)
    found = documents(vocab_size)
    file = TokenizedFile(
        str(folder / name),
        "00000_unshuffled.ds",
        save_loss_metadata=with_loss,
        tokenizer_name_or_path="made-up/tokenizer",
        save_final_metadata=True,
        token_size=token_size,
    )
    for document in found:
        file.write(document.tolist(), loss_mask(document) if with_loss else None)
    file.close()
    write_truth(folder / name, found, vocab_size=vocab_size, loss=with_loss)
