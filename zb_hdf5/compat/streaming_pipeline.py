"""The streaming pipeline's own function names: Parquet text, tokenized while training runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zb_hdf5.errors import ArgumentError
from zb_hdf5.loaders.text_loader import TextLoader
from zb_hdf5.spec import SPLITS
from zb_hdf5.text.corpus import ParquetFile
from zb_hdf5.text.tokenizers import DEFAULT_BOUNDARY, Tokenizer

if TYPE_CHECKING:
    import torch

#: The folder that holds `base_data/` and `tokenizer/`.
BASE_VARIABLE = "NANOCHAT_BASE_DIR"
BASE_DIR = "~/.cache/nanochat"


class TokenizingLoader(TextLoader):
    """A `TextLoader` of `(inputs, targets)` whose inputs are torch.int32, and its targets torch.int64."""

    def get_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next `(inputs, targets)`, both of shape (B, T)."""
        import torch

        inputs, targets = super().get_batch()
        return inputs.to(torch.int32), targets


def list_parquet_files(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the `.parquet` files of a folder, in the order of their names.

    Parameters
    ----------
    data_dir
        By default `base_data` in the folder that NANOCHAT_BASE_DIR names, or else in ~/.cache/nanochat.
    """
    folder = _base() / "base_data" if data_dir is None else Path(data_dir)
    return [str(folder / name) for name in sorted(os.listdir(folder)) if name.endswith(".parquet")]


def parquets_iter_batched(
    split: str, start: int = 0, step: int = 1, *, data_dir: str | os.PathLike[str] | None = None
) -> Iterator[list[str]]:
    """Yield the texts of one row group after the other: of each file, row groups `start`, `start + step`, ...

    Parameters
    ----------
    split
        "val": the last file. "train": all others.
    """
    if split not in SPLITS:
        raise ArgumentError(f"split must be one of {', '.join(SPLITS)}, found {split!r}")
    paths = list_parquet_files(data_dir)
    for path in paths[-1:] if split == "val" else paths[:-1]:
        file = ParquetFile(Path(path), "text")
        for number in range(start, file.num_row_groups, step):
            yield [text for block in file.row_group(number) for text in block.texts]


def tokenizing_distributed_data_loader(
    B: int,  # the names that its users write
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    tokenizer: str | Tokenizer | None = None,
    bos_token: str = DEFAULT_BOUNDARY,
    device: str | torch.device | None = None,
) -> TokenizingLoader:
    """Return an endless loader of `(inputs, targets)`, int32 and int64, of shape (B, T).

    Parameters
    ----------
    tokenizer_batch_size
        Without effect: batches do not depend on how many texts are tokenized at once.
    data_dir
        As for `list_parquet_files`.
    tokenizer
        As for `TextLoader`; by default `tokenizer/tokenizer.json` beside `base_data`.
    bos_token
        The special token in front of each document.
    device
        Where the batches go; by default the CUDA device, if there is one.
    """
    import torch

    if tokenizer_batch_size < 1:
        raise ArgumentError(f"tokenizer_batch_size must be at least 1, found {tokenizer_batch_size}")
    if device is None and torch.cuda.is_available():
        device = "cuda"
    return TokenizingLoader(
        _base() / "base_data" if data_dir is None else data_dir,
        tokenizer=tokenizer or f"hf:{_base() / 'tokenizer' / 'tokenizer.json'}",
        batch_size=B,
        seq_len=T,
        split=split,
        targets=True,
        boundary_token=bos_token,
        num_threads=tokenizer_threads,
        device=device,
    )


def _base() -> Path:
    return Path(os.environ.get(BASE_VARIABLE) or BASE_DIR).expanduser()
