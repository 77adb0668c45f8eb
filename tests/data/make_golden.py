"""Makes the golden files beside it: run once for each version of the format, by hand, and never by a test.

    python tests/data/make_golden.py

The metadata block of the HDF5 files is smaller than the writer's own, which would make each of them a megabyte: it is a
property of the call, not of the format.
"""

from pathlib import Path
from unittest.mock import patch

import numpy as np

from zb_hdf5 import HDF5ShardWriter, ShardEntry, ShardIndex, StoreMeta, open_writer

DATA = Path(__file__).parent
TOKENS = np.array(
    [
        [[0, 1, 2, 3, 5, 8, 13, 21], [50256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 34, 55]],
        [[89, 144, 233, 377, 610, 987, 1597, 2584], [7, 7, 7, 7, 0, 0, 0, 0]],
    ]
)
STORE_TOKENS = np.arange(4 * 2 * 8).reshape(4, 2, 8) * 4 % 257
OPTIONS = {"batch_size": 2, "seq_len": 8, "seed": 42}


def make_file(path, tokens, **options):
    with open_writer(path, **OPTIONS, **options) as writer:
        writer.write(tokens)
        return writer.finish()


def make_store(folder):
    folder.mkdir()
    entries = []
    for number, (name, tokens) in enumerate({"00000.batch": STORE_TOKENS[:1], "00001.h5": STORE_TOKENS[1:]}.items()):
        records = (2, 7)[number]
        info = make_file(folder / f"shard-{name}", tokens, dtype="uint16", vocab_size=257, total_records=records)
        entries.append(ShardEntry.of(info))
    meta = StoreMeta(2, 8, np.dtype("<u2"), 42, 9, document_count=3, vocab_size=257, tokenizer='{"name": "bytes"}')
    ShardIndex(meta, tuple(entries), "global", {"path": "somewhere"}).save(folder)


if __name__ == "__main__":
    with patch("zb_hdf5.formats.h5_writer.meta_block_bytes", lambda *_: 4096):
        with HDF5ShardWriter(DATA / "v3-stream.h5", chunk_tokens=16, boundary_token_id=7, vocab_size=257) as stream:
            for document in (TOKENS[1, 0] % 257, [], STORE_TOKENS.reshape(-1)):
                stream.write_document(document)
        make_file(DATA / "v1.batch", TOKENS, total_records=5)
        (DATA / "v1.batch.crc32").unlink()
        make_file(DATA / "v3.h5", TOKENS, total_records=5)
        for codec in ("gzip", "zstd"):  # the same batches again and again: they shrink
            make_file(DATA / f"v3-{codec}.h5", np.tile(TOKENS[:, :, :4], 2).repeat(2, 0), total_records=5, codec=codec)
        make_store(DATA / "store")
