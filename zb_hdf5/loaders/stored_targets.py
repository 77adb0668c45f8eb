"""Targets that a store has in its fields: `labels`, and a `loss_mask` of the tokens that count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import IGNORED_TARGET
from zb_hdf5.errors import ArgumentError, FormatError, ZbError, require_choice
from zb_hdf5.field import LABELS, LOSS_MASK, Field
from zb_hdf5.formats.batches import Batches

#: The ways of labels: of each token its own, or the next token.
OWN: Final = "own"
NEXT: Final = "next"
WAYS: Final = (OWN, NEXT)
#: Records that are looked at in each of three places: at the start, in the middle and at the end.
SAMPLED_RECORDS: Final = 16
#: Bytes of labels that are looked at together where the sample does not tell their way, and how many times.
SEARCHED_BYTES: Final = 1 << 20
SEARCHES: Final = 256
#: Fields of targets, one value for each token, and the kinds of their dtypes.
_DTYPE_KINDS: Final = {LABELS: "iuf", LOSS_MASK: "biuf"}


def has_targets(reader: Batches) -> bool:
    """Return whether a store has fields that its targets follow from, or other values under their names."""
    return bool(reader.meta.unfit) or any(field.name in _DTYPE_KINDS for field in reader.meta.fields)


def _require_fit(reader: Batches, field: Field) -> None:
    kinds = _DTYPE_KINDS[LABELS if field.name == LABELS else LOSS_MASK]
    if field.size != 1 or field.dtype.kind not in kinds:
        raise _unfit(
            reader, field.name, f"{field.dtype} of shape {field.shape} for each" if field.shape else field.dtype
        )


def _unfit(reader: Batches, name: str, found: object) -> ArgumentError:
    noun = "whole number" if name == LABELS else "number"
    return ArgumentError(
        f"{reader.path}: targets: expected one {noun} for each token in {name}, found {found}; store it so, or under "
        "another name"
    )


def values_of(column: Batches, records: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return records by their numbers, shape (records, seq_len): of the tokens, or of a field of one value for each."""
    out = np.empty((len(records), column.seq_len), column.dtype)
    column.read_records_into(records, out)
    return out


def problem_of_targets(reader: Batches) -> str:
    """Return why no loader takes the fields of targets, by their kinds and the first floats; "": it does, or none are.

    The way of the labels is not looked for, and nothing else is read.
    """
    if not has_targets(reader):
        return ""
    try:
        found = StoredTargets(reader, OWN)
        if any(field.dtype.kind == "f" for field in reader.meta.fields if field.name in found.names):
            records = np.arange(min(SAMPLED_RECORDS, reader.num_records))
            tokens = np.zeros((len(records), reader.seq_len), np.int64)
            found.labels_of(tokens, lambda name: values_of(reader.field(name), records))
    except ZbError as error:
        return error.facts.removeprefix(f"{reader.path}: targets: ")
    return ""


class StoredTargets:
    """The targets of the records of a store, if it has fields of them.

    Trainers write labels in two ways: the label of a position is its own token, as in `transformers`, whose models
    shift; or it is the token after it, as in files for Cerebras. The labels themselves tell which: they are compared
    with the tokens, where they count. First 16 records at the start, in the middle and at the end are looked at; where
    these agree with both ways, or have no label that counts, 1 MiB of labels at a time, up to 256 times: at the
    start, in the middle, at the first and at the third quarter, at the odd eighths, and so on.

    Parameters
    ----------
    reader
        The store.
    way
        The way of the labels, one of `WAYS`: nothing is compared. None: they tell it.
    mask
        The field that is the mask of the tokens that count, if it is there.

    Attributes
    ----------
    names
        The fields that the targets follow from.

    Raises
    ------
    ArgumentError
        If a field of targets has not one number for each token, or the labels do not tell their way.
    """

    def __init__(self, reader: Batches, way: str | None = None, mask: str = LOSS_MASK) -> None:
        if way is not None:
            require_choice("labels", way, WAYS)
        self._reader = reader
        self._way = way
        #: Records from the start that have no label that counts: records of a store that grows.
        self._num_empty = 0
        for name, words in reader.meta.unfit:
            raise _unfit(reader, name, words)
        found = {field.name: field for field in reader.meta.fields if field.name in (LABELS, mask)}
        for field in found.values():
            _require_fit(reader, field)
        self.names = tuple(found)
        self._mask_name = mask
        self._has_labels = LABELS in found
        self._has_mask = mask in found
        if self._has_labels and reader.num_records:
            _ = self._is_next  # an error is raised now

    # --- the way of the labels -----------------------------------------------------------------------------------

    @property
    def _is_next(self) -> bool:
        """Whether the label of a position is the token after it, and the mask that of the label."""
        if self._way is None:
            self._way = self._told_way()
        return self._way == NEXT

    def _told_way(self) -> str | None:
        """Return the way that the labels tell; None: none counts so far in a store that still grows."""
        reader = self._reader
        total = reader.num_records
        searches, is_all = self._searches(self._num_empty, total)
        fits = dict.fromkeys(WAYS, True)
        is_counted = False
        for ranges in searches:
            for first, stop in ranges:
                is_counted |= self._compare(np.arange(first, stop), fits)
            if is_counted and not all(fits.values()):
                break
        told = [way for way, is_fit in fits.items() if is_fit]
        if len(told) == 1:
            return told[0]
        if not is_counted and is_all:
            self._num_empty = total
            return OWN if reader.complete else None
        if told:
            facts = "that tell whether they are the tokens or the next ones, found " + (
                "labels that are both" if is_counted else "none that counts in the records that were looked at"
            )
        else:
            facts = "that are the tokens, or the next ones, found others; read them as a field: fields=('labels',); or"
        joint = "; " if told else " "
        raise ArgumentError(
            f"{reader.path}: targets: expected {LABELS} {facts}{joint}pass labels='own' or labels='next'"
        )

    def _searches(self, first: int, total: int) -> tuple[Iterator[list[tuple[int, int]]], bool]:
        """Return ranges of records, those that are looked at together in one list, and whether they are all records."""
        labels = self._reader.field(LABELS)
        size = max(SAMPLED_RECORDS, SEARCHED_BYTES // (labels.seq_len * labels.dtype.itemsize))
        count = -(-(total - first) // size)
        last = max(first, total - SAMPLED_RECORDS)
        places = dict.fromkeys((first, (first + last) // 2, last))
        sample = [(place, min(place + SAMPLED_RECORDS, total)) for place in places]
        starts = (first + number * size for number in islice(_spread(count), SEARCHES))
        blocks = ([(start, min(start + size, total))] for start in starts)
        return chain([sample], blocks), count <= SEARCHES

    def _compare(self, records: npt.NDArray[np.int64], fits: dict[str, bool]) -> bool:
        """Compare the labels that count with the tokens, and note the ways that do not fit; return if any counts."""
        reader = self._reader
        # the records of one token, of a stream that is read by its documents, are one text
        shape = (1, -1) if reader.seq_len == 1 else (-1, reader.seq_len)
        labels = self._whole(values_of(reader.field(LABELS), records)).reshape(shape)
        counts = labels >= 0
        if self._has_mask:
            counts &= self._mask(values_of(reader.field(self._mask_name), records)).reshape(shape)
        if not counts.any():
            return False
        tokens = values_of(reader, records).astype(np.int64).reshape(shape)
        fits[OWN] &= np.array_equal(labels[counts], tokens[counts])
        inner = counts[:, :-1]
        fits[NEXT] &= np.array_equal(labels[:, :-1][inner], tokens[:, 1:][inner])
        return True

    # --- targets -------------------------------------------------------------------------------------------------

    def put_into(self, found: npt.NDArray[np.int64], values: Callable[[str], npt.NDArray[Any]]) -> None:
        """Put the stored targets in place of the next tokens; a place that has no target keeps none.

        Parameters
        ----------
        found
            The next token of each token, or -100: shape (rows, seq_len).
        values
            Returns the values of a field for these tokens.
        """
        if self._has_labels:
            labels = self._of_targets(self._whole(values(LABELS)).reshape(found.shape))
            has_target = found != IGNORED_TARGET
            found[has_target] = np.where(labels < 0, IGNORED_TARGET, labels)[has_target]
        if self._has_mask:
            mask = self._mask(values(self._mask_name)).reshape(found.shape)
            found[~self._of_targets(mask)] = IGNORED_TARGET

    def labels_of(
        self, tokens: npt.NDArray[np.int64], values: Callable[[str], npt.NDArray[Any]]
    ) -> npt.NDArray[np.int64]:
        """Return the label of each token, shape (rows, seq_len), for models that shift them: -100 where there is none.

        Parameters
        ----------
        tokens
            The tokens, which are the labels of a store that has a mask only.
        values
            As for `put_into`.
        """
        found = tokens.copy()
        if self._has_labels:
            found = self._of_tokens(self._whole(values(LABELS)).reshape(tokens.shape)).copy()
        found[found < 0] = IGNORED_TARGET
        if self._has_mask:
            found[~self._of_tokens(self._mask(values(self._mask_name)).reshape(tokens.shape))] = IGNORED_TARGET
        if self._has_labels and self._is_next:
            found[:, 0] = IGNORED_TARGET  # no token before it predicts the first one
        return found

    def _of_tokens(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value that belongs to each token as the target of the one before it."""
        return np.roll(values, 1, axis=1) if self._has_labels and self._is_next else values

    def _of_targets(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value that belongs to the target of each token: its own, or that of the next token."""
        return values if self._has_labels and self._is_next else np.roll(values, -1, axis=1)

    def _whole(self, labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return labels of any dtype as whole numbers; `FormatError` for a fraction."""
        with np.errstate(invalid="ignore"):  # the error below names the value
            found: npt.NDArray[np.int64] = labels.astype(np.int64)
        if labels.dtype.kind == "f":
            is_other = found != labels
        elif labels.dtype == np.uint64:
            is_other = found < 0
        else:
            return found
        if is_other.any():
            self._refuse(LABELS, "whole numbers", labels[is_other][0])
        return found

    def _mask(self, mask: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which tokens a mask counts; `FormatError` for a value that is not a whole number, such as a weight."""
        is_named = self._mask_name == LOSS_MASK  # the user has chosen any other
        if mask.dtype.kind == "f" and (is_other := (np.rint(mask) != mask) if is_named else np.isnan(mask)).any():
            self._refuse(self._mask_name, "whole numbers", mask[is_other][0])
        counted: npt.NDArray[np.bool_] = mask != 0
        return counted

    def _refuse(self, name: str, expected: str, found: Any) -> None:
        raise FormatError(f"{self._reader.path}: targets: expected {expected} in the field {name}, found {found}")


def _spread(count: int) -> Iterator[int]:
    """Yield the numbers below a count, far from each other first: their bits in the reverse order count up."""
    bits = (count - 1).bit_length() if count else 0
    numbers = (int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(1 << bits if count else 0))
    return (number for number in numbers if number < count)
