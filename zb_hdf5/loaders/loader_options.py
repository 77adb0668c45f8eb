"""The options of the loaders for type checkers, which see a wrong name, word or kind of value before a run does.

`typing.get_type_hints` finds them too; torch is imported for it, and for nothing else. A test compares them with the
code.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from zb_hdf5.formats.access import Access, Verify
from zb_hdf5.packages import LaterModule
from zb_hdf5.read_as import ReadAs
from zb_hdf5.store.cache import Cache
from zb_hdf5.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch", "torch")

ShuffleWord: TypeAlias = Literal["global", "records", "block", "sequential"]
#: `("block", 256)` has the batches of a block.
WantedShuffle: TypeAlias = ShuffleWord | tuple[Literal["block"], int]
Last: TypeAlias = Literal["drop", "fill", "short", "masked"]
DocumentValue: TypeAlias = Literal[
    "cu_seqlens", "max_seqlen", "seq_lens", "position_ids", "document_ids", "documents", "sources"
]
#: The name of such a value; `cu_seqlens` may have the length to which it is filled up, and "meta" has the name of a
#: field set: at run time "meta:lang" is the same.
DocumentName: TypeAlias = DocumentValue | tuple[Literal["cu_seqlens"], int] | tuple[Literal["meta"], str]
WantedDocuments: TypeAlias = bool | Collection[DocumentName]
Collate: TypeAlias = Literal["pad", "pack"]
TooLong: TypeAlias = Literal["refuse", "truncate", "drop"]
LabelsWay: TypeAlias = Literal["own", "next"]
DocumentShuffle: TypeAlias = Literal["global", "lengths", "sequential"]
TextSplit: TypeAlias = Literal["train", "val", "test"]
#: The batches of a loader: tokens, pairs (x, y), or dictionaries.
TokenBatch: TypeAlias = "torch.Tensor"
PairBatch: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class DocumentStep(TypedDict):
    """A step with `documents` or `spans`: the values that were asked for."""

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    seq_lens: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    documents: torch.Tensor
    sources: torch.Tensor
    store: str
    spans: list[Any]
    span_index: torch.Tensor


class SourceOptions(TypedDict, total=False):
    """How a store is opened, and how its batches are shaped and read: what `Loader` and `MixedLoader` have both."""

    backend: str
    access: Access
    verify: Verify
    read_as: ReadAs
    cache: str | os.PathLike[str] | Cache | None
    split: str | None
    shuffle: WantedShuffle
    seed: int
    rank: int | None
    world_size: int | None
    batch_size: int | None
    seq_len: int | None
    prefetch: int | Literal["auto"]
    dtype: torch.dtype | None
    labels: LabelsWay | None
    tokenizer: str | Tokenizer | None


class LoaderOptions(SourceOptions, total=False):
    """The options of `Loader` that do not decide the kind of its batches."""

    drop_last: bool
    last: Last | None
    device: str | torch.device | None
    skip: Collection[tuple[int, int, int]]
    mask_documents: Collection[int]


class TextLoaderOptions(TypedDict, total=False):
    """The options of `TextLoader` that do not decide the kind of its batches, and that have a default."""

    split: TextSplit
    boundary_token: str
    boundary_position: Literal["before", "after"]
    text_column: str
    rank: int | None
    world_size: int | None
    num_threads: int
    prefetch: int | Literal["auto"]
    device: str | torch.device | None
