"""The options of a conversion that is to fit a store which is there: the same batches, for another format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from zb_hdf5 import ArgumentError, IncompleteError
from zb_hdf5.converters.conversion import OPTIONS, Conversion
from zb_hdf5.converters.option import Taking
from zb_hdf5.spec import DEFAULT_SPLIT, STREAM_LAYOUT
from zb_hdf5.store.format_list import FORMATS
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.store_corpus import StoreCorpus

#: The options that a store names in `source`, where its conversion had them.
_NAMED: Final = ("remainder", "pad_id", "packing")


def options_like(conversion: Conversion, like: Path, known: Mapping[str, Taking]) -> tuple[Conversion, str]:
    """Return a conversion with the options of a store, but for those that were given; and the dtype of the store.

    Parameters
    ----------
    conversion
        A conversion as it was asked for.
    like
        The store, or a lone file.
    known
        The options that apply to its source and target.
    """
    if conversion.is_stream:
        raise ArgumentError(f"like={str(like)!r} is for batches, found a target of streams", options=["like"])
    found, num_splits = likeness_of(like)
    dtype = found["dtype"]
    row = FORMATS[conversion.target]
    if "dtype" in known and conversion.dtype is None and dtype == "uint8" and not row.holds_uint8:
        raise ArgumentError(
            f"like: {like} has ids of one byte, and {row.name} files have none: to have the same tokens, "
            "make both with dtype='uint16'",
            options=["like", "dtype"],
        )
    is_one_file = conversion.destination.suffix == FORMATS[conversion.target].suffix
    # each split of a store keeps as many shards as it has; documents are dealt out anew
    has_own_shards = num_splits > 1 and "packing" not in known
    if is_one_file or has_own_shards or conversion.shard_size is not None:
        del found["shards"]
    taken = {
        name: value
        for name, value in found.items()
        if name in known and getattr(conversion, name) is None and value in (known[name].choices or (value,))
    }
    return conversion.changed(**taken), dtype


class Likeness(NamedTuple):
    """The options that make batches as a store has them, None where it does not name one; and how many splits it has.

    The number of shards is that of its training split.
    """

    options: dict[str, Any]
    num_splits: int


def likeness_of(path: Path) -> Likeness:
    """Return the likeness of a store, or of a lone file.

    Raises
    ------
    ArgumentError
        If it is a token stream.
    IncompleteError
        If its writer has not finished.
    FormatError
        If it is not a store.
    """
    found = found_at(path)
    if found.layout == STREAM_LAYOUT:
        raise ArgumentError(f"{path}: like: expected a store of batches, found a token stream")
    with corpus_of(found) as corpus:
        if not corpus.complete:
            raise IncompleteError(f"{path}: like: its writer has not finished")
        meta = corpus.meta
        source = corpus.origin.get("source", {})
        shuffle = corpus.origin.get("shuffle")
        vocab_size = meta.vocab_size
        num_shards: int | None = None
        num_splits = 1
        if isinstance(corpus, StoreCorpus):
            index = corpus.index.without_max_token()
            source = index.source
            shuffle = index.shuffle
            vocab_size = index.meta.vocab_size
            splits = index.table.values["split"]
            num_shards = splits.count(DEFAULT_SPLIT) or len(splits)
            num_splits = len({*splits})
    options = {
        "batch_size": meta.batch_size,
        "seq_len": meta.seq_len,
        "dtype": meta.dtype.name,
        "vocab_size": vocab_size or None,
        "seed": meta.seed,
        "shuffle": shuffle == "global" if shuffle in ("global", "none") else meta.seed > 0,
        "shards": num_shards,
        **{name: _named(source, name) for name in _NAMED},
    }
    return Likeness(options, num_splits)


def _named(source: dict[str, Any], name: str) -> Any:
    """Return an option that `source` names, which is free JSON: None unless it is a value of that option."""
    value = source.get(name)
    kind = OPTIONS[name].kind
    is_possible = value in kind if isinstance(kind, tuple) else type(value) is int and value >= 0
    return value if is_possible else None
