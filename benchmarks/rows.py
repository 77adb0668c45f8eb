"""The rows of `read`: every way to get the same batches, each a function that opens it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.measure import BATCH_SIZE, BATCH_TOKENS, SEED, SEQ_LEN
from zb_hdf5 import Loader, open_reader
from zb_hdf5.loaders.order import BlockOrder
from zb_hdf5.spec import HEADER_BYTES

Epoch = Callable[[int], Iterable[Any]]


@dataclass(frozen=True)
class Setup:
    """Where the data lies, and how much there is."""

    folder: Path
    num_batches: int
    block_size: int

    def order(self, epoch: int) -> list[int]:
        """Return the batch numbers of an epoch, block-shuffled."""
        order = BlockOrder(self.num_batches, SEED, epoch, self.block_size)
        return order.indices(np.arange(self.num_batches)).tolist()

    @property
    def tokens(self) -> int:
        """Tokens in one epoch."""
        return self.num_batches * BATCH_TOKENS


@dataclass(frozen=True)
class Row:
    """One way to read.

    Attributes
    ----------
    group
        Colour in the picture.
    file
        What it reads, inside the folder.
    open
        Setup -> (epoch number -> batches).
    ordered
        Whether its batches come in the order of `Setup.order`.
    yields
        The dtype of its batches.
    """

    name: str
    group: str
    file: str
    open: Callable[[Setup, str], Epoch]
    ordered: bool = True
    yields: str = "int64"


def _open_limit(setup: Setup, file: str, *, dtype: str = "uint32") -> Epoch:
    """Nothing but the widening: tokens in memory to fresh int64 tensors."""
    tokens = np.load(setup.folder / file).astype(dtype, copy=False).reshape(-1, BATCH_SIZE, SEQ_LEN)
    return lambda epoch: (torch.from_numpy(tokens[i].astype(np.int64)) for i in setup.order(epoch))


def _open_reader(setup: Setup, file: str, *, access: str) -> Epoch:
    reader = open_reader(setup.folder / file, access=access)
    return lambda epoch: map(reader.read_batch_torch, setup.order(epoch))


def _open_view(setup: Setup, file: str) -> Epoch:
    """The batch as stored, not read, not widened: what a consumer of uint32 has to pay."""
    reader = open_reader(setup.folder / file, access="mmap")
    return lambda epoch: map(reader.read_batch, setup.order(epoch))


def _open_loader(setup: Setup, file: str, *, access: str = "auto", dtype: torch.dtype = torch.int64) -> Epoch:
    loader = Loader(
        setup.folder / file, shuffle="block", block_size=setup.block_size, seed=SEED, rank=0, world_size=1,
        access=access, dtype=dtype,
    )  # fmt: skip

    def epoch_of(epoch: int) -> Loader:
        loader.set_epoch(epoch)
        return loader

    return epoch_of


def _open_memmap_loop(setup: Setup, file: str) -> Epoch:
    """Three lines without any library."""
    tokens = _memmap(setup, file, "r")
    return lambda epoch: (torch.from_numpy(tokens[i].astype(np.int64)) for i in setup.order(epoch))


def _open_int32_view(setup: Setup, file: str) -> Epoch:
    """The same without widening: a view of a private mapping."""
    tokens = _memmap(setup, file, "c").view(np.int32)
    return lambda epoch: (torch.from_numpy(tokens[i]) for i in setup.order(epoch))


def _memmap(setup: Setup, file: str, mode: str) -> npt.NDArray[np.uint32]:
    shape = (setup.num_batches, BATCH_SIZE, SEQ_LEN)
    return np.memmap(setup.folder / file, np.uint32, mode, HEADER_BYTES, shape).view(np.ndarray)


def _open_preadv_loop(setup: Setup, file: str) -> Epoch:
    """One system call per batch, into one buffer, widened from there."""
    fd = os.open(setup.folder / file, os.O_RDONLY)
    buffer = np.empty((BATCH_SIZE, SEQ_LEN), np.uint32)

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        for i in setup.order(epoch):
            os.preadv(fd, (buffer,), HEADER_BYTES + i * buffer.nbytes)
            yield torch.from_numpy(buffer.astype(np.int64))

    return batches


def _open_tensor(setup: Setup, file: str) -> Epoch:
    """`torch.load`, then 32 shuffled records per batch by one fancy index."""
    tokens = torch.load(setup.folder / file)

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(epoch))
        return (tokens[records].long() for records in order.split(BATCH_SIZE))

    return batches


def _open_tensor_dataset(setup: Setup, file: str) -> Epoch:
    """PyTorch's defaults: a TensorDataset of int64, collated record by record."""
    dataset = TensorDataset(torch.load(setup.folder / file).long())
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    return lambda epoch: (batch for (batch,) in loader)


class _Records(Dataset[torch.Tensor]):
    """Records of a memory-mapped array that answers a whole batch of indices at once."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.load(path, mmap_mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.from_numpy(self._tokens[indices].astype(np.int64))


def _keep(batch: torch.Tensor) -> torch.Tensor:
    return batch


def _open_getitems(setup: Setup, file: str) -> Epoch:
    loader = DataLoader(_Records(setup.folder / file), batch_size=BATCH_SIZE, shuffle=True, collate_fn=_keep)
    return lambda epoch: loader


_FLOOR, _OURS, _TORCH, _VIEW = "floors", "zb_hdf5", "PyTorch", "views"
_AUTO, _MMAP, _PREAD, _H5PY = (partial(_open_reader, access=access) for access in ("auto", "mmap", "pread", "h5py"))
NPY, ONE, NATIVE, HDF5, HDF5_16, TENSOR = (
    "tokens.npy", "tokens.batch", "store-batch", "store-h5", "store-h5-uint16", "tokens.pt",
)  # fmt: skip
ROWS: Final = (
    Row("limit", _FLOOR, NPY, _open_limit),
    Row("limit uint16", _FLOOR, NPY, partial(_open_limit, dtype="uint16")),
    Row("preadv loop", _FLOOR, ONE, _open_preadv_loop),
    Row("np.memmap loop", _FLOOR, ONE, _open_memmap_loop),
    Row("loader hdf5", _OURS, HDF5, _open_loader),
    Row("loader hdf5 mmap", _OURS, HDF5, partial(_open_loader, access="mmap")),
    Row("loader hdf5 uint16", _OURS, HDF5_16, _open_loader),
    Row("loader hdf5 uint16 mmap", _OURS, HDF5_16, partial(_open_loader, access="mmap")),
    Row("loader native", _OURS, NATIVE, _open_loader),
    Row("loader native mmap", _OURS, NATIVE, partial(_open_loader, access="mmap")),
    Row("hdf5 auto", _OURS, HDF5, _AUTO),
    Row("hdf5 mmap", _OURS, HDF5, _MMAP),
    Row("hdf5 pread", _OURS, HDF5, _PREAD),
    Row("hdf5 h5py", _OURS, HDF5, _H5PY),
    Row("native auto", _OURS, NATIVE, _AUTO),
    Row("native mmap", _OURS, NATIVE, _MMAP),
    Row("torch.load, fancy index", _TORCH, TENSOR, _open_tensor, ordered=False),
    Row("DataLoader memmap __getitems__", _TORCH, NPY, _open_getitems, ordered=False),
    Row("DataLoader TensorDataset", _TORCH, TENSOR, _open_tensor_dataset, ordered=False),
    Row("int32 view", _VIEW, ONE, _open_int32_view, yields="int32"),
    Row("loader hdf5 int32", _VIEW, HDF5, partial(_open_loader, dtype=torch.int32), yields="int32"),
    Row("hdf5 mmap view (uint32)", _VIEW, HDF5, _open_view, yields="uint32"),
)
BY_NAME: Final = {row.name: row for row in ROWS}
