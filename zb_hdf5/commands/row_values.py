"""The values of field sets in a row: of its tokens, of the records in it, and of its documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.rows import Row
from zb_hdf5.console import printable
from zb_hdf5.errors import IncompleteError
from zb_hdf5.field import BFLOAT16, SET_MARK, UNITS, Field
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.notes import note
from zb_hdf5.store.bound_tokens import split_of
from zb_hdf5.store.found_set import found_set
from zb_hdf5.store.set_facts import SetFacts
from zb_hdf5.store.set_place import facts_at, set_folder
from zb_hdf5.text.readable import readable
from zb_hdf5.text.tokenizers import Tokenizer

#: Tokens whose values are written out, and numbers of each.
TOKENS_SHOWN: Final = 16
NUMBERS_SHOWN: Final = 4


class RowValues(NamedTuple):
    """The values of field sets in a row, by their names: "teacher/logprobs".

    Attributes
    ----------
    of_tokens
        Those of each token, shape (S, ...).
    of_units
        The number of each record or document of the row, and its value: a number, or a list.
    """

    of_tokens: Mapping[str, npt.NDArray[Any]] = {}
    of_units: Mapping[str, Mapping[int, Any]] = {}


class ShownSet(NamedTuple):
    """A field set whose values are shown.

    Attributes
    ----------
    facts
        Its facts.
    values
        The values of each field, by its own name.
    """

    facts: SetFacts
    values: Mapping[str, Corpus]


def shown_sets(batches: Batches, names: Sequence[str]) -> list[ShownSet]:
    """Open the field sets of these names; of one that is not finished missing values are 0, or the fill of the field.

    Raises
    ------
    NotFoundError, ChecksumError
        As `found_set`.
    """
    return [_shown(batches.corpus, name) for name in names]


def _shown(corpus: Corpus, name: str) -> ShownSet:
    try:
        facts = found_set(corpus, name).facts
    except IncompleteError:
        facts = facts_at(set_folder(corpus.path, name, split_of(corpus)), name, corpus.path)
        note(f"{corpus.path}: the field set {name} is not finished: missing values are shown as 0, or as their fill")
        fills = {field.name: 0.0 for field in facts.fields if field.fill is None}
        corpus = corpus.with_fields(name, allow_missing=fills)
    return ShownSet(facts, {field.name: corpus.field(f"{name}{SET_MARK}{field.name}") for field in facts.fields})


def values_in_row(sets: Sequence[ShownSet], row: Row) -> RowValues:
    """Read the values of some field sets for a row."""
    of_tokens: dict[str, npt.NDArray[Any]] = {}
    of_units: dict[str, Mapping[int, Any]] = {}
    for facts, values in sets:
        if facts.is_of_documents:
            numbers = sorted({number for number in row.documents.tolist() if number >= 0})
        else:
            numbers = _records_in(row.ranges, facts.record_tokens)
        for field in facts.fields:
            name = f"{facts.name}{SET_MARK}{field.name}"
            if field.unit == UNITS[0]:
                of_tokens[name] = _read(values[field.name], field, row.ranges)
            else:
                found = _read(values[field.name], field, [(number, 1) for number in numbers])
                of_units[name] = dict(zip(numbers, found.tolist(), strict=True))
    return RowValues(of_tokens, of_units)


def _records_in(ranges: Sequence[tuple[int, int]], record_tokens: int) -> list[int]:
    """Return the numbers of the records that have tokens of some ranges, in order."""
    found = (range(start // record_tokens, -(-(start + count) // record_tokens)) for start, count in ranges)
    return sorted({number for numbers in found for number in numbers})


def _read(values: Corpus, field: Field, ranges: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
    """Return the values of ranges, one after the other; bfloat16 as float32, which people read."""
    lengths = [count * field.size for _, count in ranges]
    out = np.empty(sum(lengths), values.dtype)
    parts = np.split(out, np.cumsum(lengths)[:-1])
    values.tokens.read((start * field.size, part) for (start, _), part in zip(ranges, parts, strict=False) if len(part))
    if field.kind == BFLOAT16:
        out = (out.astype(np.uint32) << 16).view(np.float32)
    return out.reshape(-1, *field.shape)


def with_values(row: Row, values: RowValues) -> Row:
    """Return a row that has the values of its tokens among its fields."""
    return row._replace(fields={**row.fields, **values.of_tokens})


def values_json(values: RowValues) -> dict[str, Any]:
    """Return the values of records and documents, for programs; the values of tokens are among the fields of parts."""
    return {
        "field_sets": {
            name: [{"number": number, "value": value} for number, value in found.items()]
            for name, found in values.of_units.items()
        }
    }


def drawn_values(row: Row, values: RowValues, tokenizer: Tokenizer | None, *, all_tokens: bool) -> Iterator[str]:
    """Yield the values of a row beside its ids, one token a line, and the values of its records and documents.

    Parameters
    ----------
    all_tokens
        Whether all tokens are shown, and not the first ones.
    """
    for name, found in values.of_units.items():
        for number, value in found.items():
            yield f"  {name} of {number:,}: {_text(np.asarray(value))}"
    if not values.of_tokens:
        return
    count = len(row.tokens) if all_tokens else min(TOKENS_SHOWN, len(row.tokens))
    heads = ["column", "id", *([] if tokenizer is None else ["token"]), *values.of_tokens]
    lines = [heads]
    for column in range(count):
        token = row.tokens[column : column + 1]
        text = [] if tokenizer is None else [printable(readable(tokenizer, token))]
        numbers = [_text(found[column]) for found in values.of_tokens.values()]
        lines.append([f"{column:,}", str(token[0]), *text, *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
    if left := len(row.tokens) - count:
        yield f"  {left:,} tokens more; --all shows them, --json has them"


def _text(values: npt.NDArray[Any]) -> str:
    """Return a number, or the first ones of several."""
    numbers = values.reshape(-1)
    shown = [f"{each:.4g}" if numbers.dtype.kind == "f" else str(each) for each in numbers[:NUMBERS_SHOWN].tolist()]
    more = f" … {len(numbers):,}" if len(numbers) > NUMBERS_SHOWN else ""
    return " ".join(shown) + more
