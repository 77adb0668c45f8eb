"""Uses of the loaders that type checkers take, each with the type that they see. Not run."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

from zb_hdf5 import (
    Batches,
    Cache,
    DocumentLoader,
    Loader,
    LoaderOptions,
    MixedLoader,
    ReadAs,
    TextLoader,
    convert,
    open_reader,
)
from zb_hdf5.loaders.loader_options import DocumentStep

assert_type(Loader("store"), Loader[torch.Tensor])
assert_type(next(Loader("store", seed=1, shuffle="records")), torch.Tensor)
assert_type(Loader("store", batch_size=8).get_batch(), torch.Tensor)
assert_type(Loader("store").dataset()[0], torch.Tensor)
for tokens in Loader("store", dtype=torch.int32):
    assert_type(tokens, torch.Tensor)

x, y = next(Loader("store", targets=True, last="masked"))
assert_type(x, torch.Tensor)
assert_type(y, torch.Tensor)

assert_type(next(Loader("store", documents=True, targets=True)), DocumentStep)
assert_type(next(Loader("store", documents=["cu_seqlens", "position_ids"])), DocumentStep)
assert_type(next(Loader("store", documents=[("cu_seqlens", 4096), "position_ids"]))["cu_seqlens"], torch.Tensor)
assert_type(next(Loader("store", fields=["loss_mask"])), dict[str, Any])
assert_type(next(Loader("store", fields=["loss_mask"], documents=True)), dict[str, Any])
assert_type(next(Loader("store", spans=True)), DocumentStep)

config: LoaderOptions = {"batch_size": 8, "shuffle": ("block", 64), "cache": Cache("cache", "200GiB")}
assert_type(next(Loader("store", **config)), torch.Tensor)
assert_type(next(Loader("other.h5", read_as=ReadAs(dataset="tokens"))), torch.Tensor)


def either(targets: bool, loader: Loader) -> Any:
    """A loader whose batches are not known has `Any`; `Loader` alone is a type."""
    return next(Loader("store", targets=targets)), next(loader)


mixture = MixedLoader({"web": "web", "code": "code"}, {"web": 0.7, "code": 0.3}, batch_size=8)
assert_type(next(mixture), torch.Tensor)
pairs = MixedLoader({"web": "web"}, {"web": 1.0}, targets=True)
assert_type(next(pairs), tuple[torch.Tensor, torch.Tensor])

text = TextLoader("text", tokenizer="byte", batch_size=8, seq_len=128)
assert_type(next(text), torch.Tensor)
shifted = TextLoader("text", tokenizer="byte", batch_size=8, seq_len=128, targets=True)
assert_type(next(shifted), tuple[torch.Tensor, torch.Tensor])

documents = DocumentLoader("stream", collate="pad", batch_size=8)
assert_type(next(documents), dict[str, Any])

reader = open_reader("store", access="pread", verify="batch")
assert_type(reader, Batches)
batch: npt.NDArray[np.integer[Any]] = reader[0]

report = convert("tokens", "hdf5", "store", batch_size=8, seq_len=128)
if report is not None:
    print(report.destination)
