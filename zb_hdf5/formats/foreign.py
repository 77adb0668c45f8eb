"""A dataset of another program: the integer datasets of a file, and the sense of their axes."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

from zb_hdf5.errors import ArgumentError, FormatError, Remedy
from zb_hdf5.field import LABELS, LOSS_MASK, is_field_name
from zb_hdf5.formats.row_documents import LENGTHS_COLUMN
from zb_hdf5.hdf5.h5_chunks import register_filters, unreadable
from zb_hdf5.hdf5.h5_dataset import bytes_elsewhere
from zb_hdf5.hdf5.h5_file import h5_damage
from zb_hdf5.hdf5.odd_types import way_of_odd_types
from zb_hdf5.packages import h5py
from zb_hdf5.read_as import BATCH_AXES, ReadAs, is_a_stream
from zb_hdf5.spec import BATCHES_LABELS

#: Names of datasets that have the tokens, where others beside them have values of the same tokens.
TOKEN_NAMES: Final = ("input_ids", "tokens", "token_ids")
#: Names of values that are aligned with ids, and are none.
FIELD_NAMES: Final = (LABELS, LOSS_MASK, "attention_mask", "position_ids", "token_type_ids")
#: Integer datasets of a file, and objects of any kind, that are looked at. Each takes about 0.3 ms.
MAX_DATASETS: Final = 64
MAX_OBJECTS: Final = 4096
#: Groups inside of each other in which datasets are looked for.
MAX_LEVELS: Final = 64
#: The facts that a dataset of another program lacks.
NO_DIGESTS: Final = "a dataset of another origin has no digests"
#: Kinds of dtypes of such values.
FIELD_KINDS: Final = "biuf"
#: Entries of a second axis that may be channels (ids, a mask, labels, position ids) in place of records.
CHANNELS: Final = range(2, 5)
#: Ids of each entry, and datasets of a file, that a message shows.
IDS_SHOWN: Final = 5
DATASETS_SHOWN: Final = 10


class DatasetScan(NamedTuple):
    """The integer datasets of a file, as far as it was looked at.

    Attributes
    ----------
    datasets
        Those that may hold tokens, by their names: integers of one to three axes, in this file.
    limit
        The objects that were looked at of more than these, in words; "": all were.
    """

    datasets: dict[str, h5py.Dataset]
    limit: str = ""


def integer_datasets(h5: h5py.File) -> DatasetScan:
    """Return the datasets that may hold tokens, of a look that ends after many of them, or after many objects.

    A file may have a dataset for each of a million documents.
    """
    found: dict[str, h5py.Dataset] = {}
    num_objects = 0

    def visit(name: str, item: Any) -> str | None:
        nonlocal num_objects
        if len(found) == MAX_DATASETS:
            return f"its first {MAX_DATASETS} integer datasets"
        if num_objects == MAX_OBJECTS:
            return f"its first {MAX_OBJECTS:,} objects"
        if name.count("/") == MAX_LEVELS:  # the time of a look grows with the square of them
            return f"its first {MAX_LEVELS} levels of groups"
        num_objects += 1
        inside = isinstance(item, h5py.Dataset) and not bytes_elsewhere(item)
        if inside and item.ndim in (1, 2, 3) and item.dtype.kind in "iu":
            found[name] = item
        return None

    limit = h5.visititems(visit)
    return DatasetScan(dict(sorted(found.items())), limit or "")


def token_name(seen: DatasetScan) -> str | None:
    """Return the name of the tokens among the integer datasets of a file; None where it has to be named.

    They are the only one; or one of a name in `TOKEN_NAMES`, if all others have values for each of its tokens. Where
    not all of a file was looked at, nothing is certain.
    """
    found = seen.datasets
    if seen.limit:
        return None
    if len(found) == 1:
        return next(iter(found))
    named = [name for name in found if _base(name) in TOKEN_NAMES]
    if len(named) != 1:
        return None
    tokens = named[0]
    others = (name for name in found if name != tokens)
    is_one = all(_share_a_group(name, tokens) and found[name].shape == found[tokens].shape for name in others)
    return tokens if is_one else None


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _share_a_group(name: str, other: str) -> bool:
    """Return whether two datasets are in one group."""
    return name.rpartition("/")[0] == other.rpartition("/")[0]


def values_in_group(h5: h5py.File, name: str, tokens: h5py.Dataset) -> dict[str, h5py.Dataset]:
    """Return the datasets in the group of one that have a number for each of its tokens, by their names.

    In a group of many datasets most are documents: the names of `FIELD_NAMES` alone are looked at.
    """
    group = h5[name].parent
    names = sorted(group) if len(group) <= MAX_DATASETS else [each for each in FIELD_NAMES if each in group]
    hard = (each for each in names if isinstance(group.get(each, getlink=True), h5py.HardLink))
    found = {each: group[each] for each in hard if each != _base(name)}
    return {
        each: stored
        for each, stored in found.items()
        if isinstance(stored, h5py.Dataset) and stored.shape == tokens.shape and stored.dtype.kind in FIELD_KINDS
    }


def lengths_in_group(h5: h5py.File, name: str, tokens: h5py.Dataset) -> set[str]:
    """Return the name of the lengths of the documents of records, in the group of these: they are not a field."""
    stored = h5[name].parent.get(LENGTHS_COLUMN) if tokens.ndim > 1 else None
    return {LENGTHS_COLUMN} if isinstance(stored, h5py.Dataset) else set()


def can_be_field(name: str, stored: h5py.Dataset) -> bool:
    """Return whether values beside tokens are a field of them.

    Not if a loader gives values of this name itself, they are other tokens, or their bytes are in another file.
    """
    return is_field_name(name) and name not in TOKEN_NAMES and not bytes_elsewhere(stored)


def unfit_targets(h5: h5py.File, name: str, fields: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return the fields beside a dataset that are named as targets and have other values, each with these in words."""
    group = h5[name].parent
    found = {each: group.get(each) for each in (LABELS, LOSS_MASK) if each not in fields and each != _base(name)}
    return tuple(
        (each, f"{stored.dtype} of shape {stored.shape}")
        for each, stored in found.items()
        if isinstance(stored, h5py.Dataset)
    )


def require_channels(path: Path, name: str, stored: h5py.Dataset, read_as: ReadAs) -> None:
    """Raise `FormatError` if channels are chosen that a dataset has not."""
    if read_as.channel is None:
        return
    if stored.ndim != 3:
        found = f"channel={read_as.channel} needs a dataset of three axes, found {stored.shape}"
        raise FormatError(f"{path}: {name}: {found}")
    for what, number in (("channel", read_as.channel), *read_as.field_channels.items()):
        if number >= stored.shape[1]:
            raise FormatError(
                f"{path}: {name}: {what}={number}: expected a channel in 0..{stored.shape[1] - 1}, as the axes "
                f"{stored.shape} have them"
            )


def warn_of_mask(read_as: ReadAs) -> None:
    """Warn of a mask without its labels: in files for Cerebras it is that of the labels, the tokens shifted by one."""
    fields = read_as.field_channels
    if LOSS_MASK in fields and LABELS not in fields:
        warnings.warn(
            f"channel {fields[LOSS_MASK]} is taken as the {LOSS_MASK} of the ids themselves; "
            f"where it is that of their labels, as in files for Cerebras, each value is off by one token: name the "
            f"channel of the {LABELS} too",
            stacklevel=3,
        )


def dataset_not_chosen(h5: h5py.File, path: Path, problem: str) -> FormatError:
    """Return the error of a file whose dataset of tokens has to be named; it lists the datasets."""
    found, limit = integer_datasets(h5)
    if not found and not limit:
        facts = f"{path}: {problem}; it has no integer dataset of one to three axes"
        if way := way_of_odd_types(h5, path):
            return FormatError(f"{facts}; {way}")
        return FormatError(facts, remedy=Remedy.CONVERT, at=path)
    named = [f"{name} {stored.shape} {stored.dtype}" for name, stored in found.items()]
    shown = ", ".join(named[:DATASETS_SHOWN]) or "none is seen"
    left = len(named) - DATASETS_SHOWN
    if left > 0:
        shown += f" and {left:,} more"
    if limit:
        shown += f" (only {limit} were looked at)"
    return FormatError(f"{path}: {problem}", remedy=Remedy.DATASET, at=shown)


def no_such_axes(path: Path, axes: str) -> ArgumentError:
    """Return the error of axes that are named of anything else."""
    count = "three" if axes == BATCH_AXES else "two"
    return ArgumentError(f"{path}: axes={axes!r} needs a dataset of {count} axes that another program has written")


def require_axes(path: Path, name: str, stored: h5py.Dataset, read_as: ReadAs) -> None:
    """Refuse a dataset whose second axis may have ids, a mask or labels in place of records, unless its axes are told.

    The user tells them, or the channel of the ids; or the labels of the axes do.

    Raises
    ------
    ArgumentError
        If axes are named of a dataset that has more of them, or fewer.
    FormatError
        If the second of three axes has few entries, and nothing tells what they are.
    """
    axes = read_as.axes
    if axes is not None and stored.ndim == 1:
        raise is_a_stream(path, axes)
    if axes is not None and stored.ndim != 1 + axes.count(","):
        raise no_such_axes(path, axes)
    is_told = axes is not None or read_as.channel is not None
    if is_told or stored.ndim != 3 or stored.shape[1] not in CHANNELS or _labels_of(stored) == BATCHES_LABELS:
        return
    raise FormatError(
        f"{path}: {name}: expected records along its second axis, found {stored.shape[1]} entries, which may be ids, a "
        f"mask and labels{_first_ids(path, name, stored)}",
        remedy=Remedy.CHANNELS,
    )


def _labels_of(stored: h5py.Dataset) -> tuple[str, ...]:
    """Return the labels of the axes of a dataset; "" for each one that has none."""
    return tuple(axis.label for axis in stored.dims)


def _first_ids(path: Path, name: str, stored: h5py.Dataset) -> str:
    """Return the first ids of each entry of the first item, in words; "" if there is no item."""
    if not stored.shape[0]:
        return ""
    register_filters(stored)
    try:
        with h5_damage(path):
            first = stored[0, :, :IDS_SHOWN].tolist()
    except (OSError, FormatError) as error:
        raise unreadable(path, name, stored, error) from error
    shown = ", ".join(f"{number}: {ids}" for number, ids in enumerate(first))
    return f"; in the first item they begin with {shown}"
