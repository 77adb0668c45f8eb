"""A pipeline that tokenizes Parquet files of text while it trains."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zb_hdf5.compat.tokenized_corpus import RustBPETokenizer
from zb_hdf5.errors import require_positive
from zb_hdf5.loaders.loader_options import TextSplit
from zb_hdf5.loaders.order import resolve_rank
from zb_hdf5.loaders.text_loader import TextLoader, paths_of_split
from zb_hdf5.packages import LaterModule, require_package
from zb_hdf5.text.parquet_file import ParquetFile
from zb_hdf5.text.tokenizers import DEFAULT_BOUNDARY
from zb_hdf5.text.tokenizers import Tokenizer as TextTokenizer

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch", "torch")

BASE_URL: Final = "https://huggingface.co/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main"


def get_tokenizer() -> RustBPETokenizer:
    """Return the tokenizer of `tokenizer/tokenizer.json` in the base folder."""
    return RustBPETokenizer(f"hf:{_base() / 'tokenizer' / 'tokenizer.json'}")


def get_dist_info() -> tuple[bool, int, int, int]:
    """Return (whether there are several ranks, rank, rank on this node, ranks)."""
    rank, world_size = resolve_rank()
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return world_size > 1, rank, int(local), world_size


def list_parquet_files(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the `.parquet` files of a folder, by default of `base_data`, in the order of their names."""
    folder = data_folder(data_dir)
    return [str(folder / name) for name in sorted(os.listdir(folder)) if name.endswith(".parquet")]


def parquets_iter_batched(
    split: str,
    start: int = 0,
    step: int = 1,
    *,
    data_dir: str | os.PathLike[str] | None = None,
) -> Iterator[list[str]]:
    """Yield the texts of row groups `start`, `start + step`, ... of the last file ("val"), or of each other one."""
    for path in paths_of_split(data_folder(data_dir), split):
        file = ParquetFile(path, "text")
        for number in range(start, file.num_row_groups, step):
            yield [text for block in file.row_group(number) for text in block.texts]


class TokenizingLoader(TextLoader["tuple[torch.Tensor, torch.Tensor]"]):
    """An endless loader of `(inputs, targets)`, int32 and int64, of shape (B, T); its ranks deal the row groups.

    Parameters
    ----------
    B, T
        Rows of a batch, and tokens of a row.
    split
        "train": all files but the last one. "val": that one.
    tokenizer_threads
        Threads that tokenize.
    tokenizer_batch_size
        Has no effect on the batches.
    data_dir
        The folder of the `.parquet` files; None: `base_data`.
    tokenizer
        As for `load_tokenizer`; None: that of `get_tokenizer`.
    bos_token
        The special token in front of each document.
    device
        None: the CUDA device if there is one.
    """

    def __init__(
        self,
        B: int,  # the names that its users write
        T: int,
        split: TextSplit,
        tokenizer_threads: int = 4,
        tokenizer_batch_size: int = 128,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        tokenizer: str | TextTokenizer | None = None,
        bos_token: str = DEFAULT_BOUNDARY,
        device: str | torch.device | None = None,
    ) -> None:
        library = require_package("torch", "torch")
        require_positive(tokenizer_batch_size=tokenizer_batch_size)
        if device is None and library.cuda.is_available():
            device = "cuda"
        super().__init__(
            data_folder(data_dir),
            tokenizer=tokenizer or get_tokenizer().spec,
            batch_size=B,
            seq_len=T,
            split=split,
            targets=True,
            boundary_token=bos_token,
            num_threads=tokenizer_threads,
            device=device,
        )

    def _row_groups(self, files: list[ParquetFile], rank: int) -> dict[int, tuple[ParquetFile, int]]:
        groups = enumerate((file, number) for file in files for number in range(file.num_row_groups))
        return {place: group for place, group in groups if group[1] % self.world_size == rank}

    def _read_from(self, position: Any) -> Generator[tuple[Any, Any]]:
        return (((inputs.int(), targets), place) for (inputs, targets), place in super()._read_from(position))


tokenizing_distributed_data_loader = TokenizingLoader


def _base() -> Path:
    """Return the folder of `base_data/` and `tokenizer/`."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat").expanduser()


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the `.parquet` files: `base_data`, unless another one is named."""
    return _base() / "base_data" if folder is None else Path(folder)
