"""Batch files as ZeroBatch v2 writes, reads and loads them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.arguments import convert
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.files.publishing import refuse_existing, scratch_directory
from zb_hdf5.formats import native
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.windows import Windows
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.loader_options import WantedShuffle
from zb_hdf5.loaders.order import write_order
from zb_hdf5.spec import StoreMeta, as_stored, stored_dtype
from zb_hdf5.store.format_list import FORMATS, load_format

if TYPE_CHECKING:
    import torch  # noqa: F401 - in the text of a type


class BatchFileReader(Batches):
    """A reader of a `.batch` file. Threads and processes as for `Batches`.

    Parameters
    ----------
    path, access, verify
        As for `open_corpus`.
    """

    def __init__(self, path: str | os.PathLike[str], *, access: str = "auto", verify: str = "auto") -> None:
        corpus = native.BatchCorpus(path, access=access).with_verify(verify)
        super().__init__(corpus, cast(Windows, corpus.windows))

    version: Final = 1
    padded_batch_bytes = property(lambda self: self.meta.padded_batch_bytes)
    seed = property(lambda self: self.meta.seed)
    total_records = property(lambda self: self.meta.total_records)

    @property
    def mm(self) -> npt.NDArray[np.uint8]:
        """All bytes of the file, mapped."""
        return np.memmap(self.path, np.uint8, "r")


class BatchNativeLoader(Loader["torch.Tensor"]):
    """A `Loader` of one rank in the block order.

    Parameters
    ----------
    path
        Anything that `open_reader` takes.
    block_size
        Batches of a block; the blocks are shuffled.
    shuffle
        False: batches come as stored.
    seed
        As for `Loader`.
    epoch
        The epoch that it begins with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block_size: int = 256,
        shuffle: bool = True,
        seed: int = 42,
        epoch: int = 0,
    ) -> None:
        order: WantedShuffle = ("block", block_size) if shuffle else "sequential"
        super().__init__(path, shuffle=order, seed=seed, rank=0, world_size=1)
        self.path = path
        self.set_epoch(epoch)


def write_batch_file(
    output_path: str | os.PathLike[str],
    tokens_array: npt.ArrayLike,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    dtype: str = "uint32",
    overwrite: bool = False,
) -> int:
    """Shuffle records, group them into batches, and write a `.batch` file.

    Parameters
    ----------
    output_path
        The file to write.
    tokens_array
        Shape (num_records, seq_len), any integer dtype; a memory map is never loaded whole.
    batch_size, seq_len
        Shape of a batch. The last `num_records % batch_size` shuffled records are dropped.
    seed
        Seed of the shuffle.
    dtype
        "uint32" or "uint16". The second is an extension: other readers of `.batch` files take it for uint32.
    overwrite
        Replace an existing file.

    Returns
    -------
    int
        The number of batches.

    Raises
    ------
    ConvertError
        If the array has another shape, an id that does not fit, or fewer records than one batch.
    ExistsError
        If the file exists.
    """
    tokens = np.asanyarray(tokens_array)
    if tokens.ndim != 2 or tokens.shape[1] != seq_len:
        raise ConvertError(f"tokens_array: expected shape (num_records, {seq_len}), found {tokens.shape}")
    meta, num_batches = _plan(output_path, len(tokens), batch_size, seq_len, seed, dtype)
    order = write_order(len(tokens), seed)
    group = max(1, GROUP_BYTES // meta.batch_bytes)
    with native.BatchFileWriter(output_path, meta, expected_batches=num_batches, overwrite=overwrite) as writer:
        for start in range(0, num_batches, group):
            records = order.indices(np.arange(start * batch_size, min(start + group, num_batches) * batch_size))
            writer.write(tokens[records].reshape(-1, batch_size, seq_len))
    return num_batches


def write_batch_dataset(
    output_path: str | os.PathLike[str],
    tokens_iter: Iterable[npt.ArrayLike],
    total_records: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    dtype: str = "uint32",
    overwrite: bool = False,
    memory_bytes: int = 1 << 30,
) -> int:
    """Write the file of `write_batch_file`, byte for byte, from an iterator of records.

    The records pass through a file in `<output_path>.records.partial/`, which is converted in sequence: neither the
    memory nor a slow disk limits how many there are.

    Parameters
    ----------
    output_path, batch_size, seq_len, seed, dtype, overwrite
        As for `write_batch_file`.
    tokens_iter
        Records, each an array of shape (seq_len,).
    total_records
        The number of records that come.
    memory_bytes
        Memory of the conversion, at least 100 MiB.

    Returns
    -------
    int
        The number of batches.

    Raises
    ------
    ConvertError
        If a record has another shape or an id that does not fit, or if more or fewer records come.
    ExistsError
        If the file exists.
    """
    meta, num_batches = _plan(output_path, total_records, batch_size, seq_len, seed, dtype)
    output = Path(output_path)
    if not overwrite:
        refuse_existing(output)
    with scratch_directory(output.with_name(output.name + ".records")) as folder:
        source = folder / "records.npy"
        rows = np.lib.format.open_memmap(source, "w+", meta.dtype, (total_records, seq_len))
        for number, values in zip_longest(range(total_records), tokens_iter):
            if number is None or values is None:
                found = "more" if number is None else f"{number:,}"
                raise ConvertError(f"tokens_iter: expected {total_records:,} records, found {found}")
            record = np.asarray(values)
            name = f"record {number:,}"
            if record.shape != (seq_len,):
                raise ConvertError(f"{name}: expected shape ({seq_len},), found {record.shape}")
            rows[number] = as_stored(record, meta, name)
        del rows
        convert(
            source,
            "batch",
            output,
            batch_size=batch_size,
            seq_len=seq_len,
            seed=seed,
            dtype=meta.dtype.name,  # type: ignore[arg-type]  # one of the words, which the plan has checked
            workers=1,
            memory=memory_bytes,
            force=overwrite,
        )
    return num_batches


def _plan(
    path: object,
    total_records: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    dtype: str,
) -> tuple[StoreMeta, int]:
    """Return the shape and the number of batches of a file; `ConvertError` if a `.batch` header cannot have them."""
    meta = StoreMeta(batch_size, seq_len, stored_dtype(dtype), seed, total_records)
    num_batches = total_records // batch_size
    if num_batches == 0:
        raise ConvertError(f"{path}: {total_records:,} records do not fill one batch of {batch_size:,}")
    load_format(FORMATS["batch"]).require(meta, Path(str(path)))
    native.pack_header(meta, num_batches)
    return meta, num_batches
