"""Reads without torch, and prints the error of each use that needs it."""

import numpy as np

from zb_hdf5 import (
    BatchNativeLoader,
    DatasetLoader,
    DocumentLoader,
    FollowingLoader,
    HDF5ShardWriter,
    Loader,
    MixedLoader,
    SlidingWindowDataloader,
    TextLoader,
    UnavailableError,
    open_corpus,
    open_reader,
    open_writer,
)

with open_writer("one.h5", batch_size=2, seq_len=4) as writer:
    writer.write(np.arange(24).reshape(3, 2, 4))
with HDF5ShardWriter("stream.h5") as writer:
    writer.write_document([1, 2, 3])
np.save("flat.npy", np.arange(64, dtype=np.uint16))
with open_reader("one.h5") as reader:
    assert reader.read_batch(1)[0].tolist() == [8, 9, 10, 11]
    for needs in (reader.read_batch_torch, reader.read_batch_int32):
        try:
            needs(0)
        except UnavailableError as error:
            print(error)
for make in (
    lambda: Loader("one.h5"),
    lambda: Loader(open_reader("one.h5")),
    lambda: FollowingLoader("one.h5"),
    lambda: DocumentLoader("stream.h5", collate="pack", max_tokens=8),
    lambda: TextLoader("text.parquet", tokenizer="byte", batch_size=1, seq_len=2, split="train"),
    lambda: MixedLoader({"one": "one.h5"}, {"one": 1.0}),
    lambda: BatchNativeLoader("one.h5"),
    lambda: DatasetLoader(2, 4, 0, 1, "."),
    lambda: SlidingWindowDataloader(open_corpus("flat.npy"), 4, 2),
):
    try:
        make()
    except UnavailableError as error:
        print(error if error.__suppress_context__ else "a second traceback would stand above the line to type")
