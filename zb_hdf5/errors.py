"""The errors that this package raises on purpose, the exit code of each, and numbers as people write them.

A message states the path, the expected and the found value and, where one exists, the `Remedy`. The command line
replaces the remedy with a command (`zb_hdf5/console.py`). `OSError` passes through unchanged.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from os import PathLike
from typing import ClassVar, Final, overload

#: The destination in a line to type.
DESTINATION: Final = "DST"


class Remedy(StrEnum):
    """The cure of an error, for a caller of the library."""

    VERIFY = "verify it to find all that is damaged"
    VERIFY_DIGESTS = "verify it with its digests to find all that is damaged"
    REPAIR = "if no writer is at work on it, repair it"
    REBUILD = "restore the index, or rebuild it with rebuild_index"
    REBUILD_FORCE = "if the shards are the right ones, rebuild the index with rebuild_index(force=True)"
    DO_WITHOUT = "restore them, or pass force=True to do without"
    LEAVE_OUT = "restore it, or pass overwrite=True to leave it out of the store"
    DROP_SETS = "pass drop_field_set={names} to remove them, too, or choose another destination"
    LEAVE_SETS = "pass field_set=() to leave them behind"
    REPLACE = "remove it, or ask to replace it"
    RESUME = "resume the conversion"
    RESUME_OR_RESTART = "go on with resume=True, or start over with force=True"
    RESUME_FORCED = "go on with resume=True and force=True"
    RESTART = "start over with force=True"
    SAME_OR_RESTART = "give the same arguments and source files, or start over with force=True"
    FEWER_WORKERS = "run the same conversion with resume=True, and perhaps fewer workers"
    RESUME_WHOLE = "run it again with resume=True"
    PARTS_FIRST = "convert with shard_range=(i, n) first"
    MISSING_PARTS = "convert with resume=True and shard_range=(i, n) for each of these parts, then merge"
    OTHER_PART = "convert part {at} again with force=True and the arguments of the others, then merge"
    DROP_REMAINDER = "pass remainder='drop'"
    MPI_WORLD = "start the ranks with the process manager that this MPI library was built for"
    TOKENS_ONLY = "convert to HDF5, or pass tokens_only to leave them behind"
    ONE_KIND = "write these fields alike in all files, or pass tokens_only to leave them behind"
    DIGESTS = "make a file of digests with write_digests, or convert them to a store"
    CRC32 = "restore it, or make one for the batches as they are now with zb_hdf5.store.rebuild.add_crc32_file"
    CONVERT = "to make a store of other files, run convert('{at}', 'hdf5', destination)"
    DATASET = "pass dataset= to ReadAs or convert, with one of its integer datasets: {at}"
    CHANNELS = (
        "pass the channel of the ids, and of their fields, to ReadAs or convert, such as channel=0, "
        "field_channels={{'loss_mask': 1, 'labels': 2}}; or axes='batch,record,token' if all are records"
    )
    UNWRITTEN = (
        "pass unwritten='drop' to ReadAs or convert to leave them out, or unwritten='fill' to take the fill value {at} "
        "for them"
    )
    RECORD_AXES = "pass axes='record,token' to ReadAs if each is a record"
    FILL = "pass unwritten='fill' to take the fill value {at} for them"
    SOURCE_DTYPE = "if it has ids and no header, pass their dtype to ReadAs or convert, such as source_dtype='uint16'"
    TEXT_COLUMN = "pass text_column= with one of their keys: {at}"
    IDS = "its column {at} has ids: pass source_format='hf', and no tokenizer"
    TRAIN = "train both with train_tokenizer"
    TOKENIZER = "take the tokenizer.json of your model, or make one with train_tokenizer"
    OTHER_KIND = "leave out the kind to open them"
    REMAINDER = "pass remainder='drop', or remainder='pad' if the source is not a store"
    FILL_A_BATCH = "pass a smaller batch_size, or remainder='pad' if the source is not a store"
    FILL_THE_SHARDS = "pass a smaller number of shards"
    RECORD_LENGTH = "pass the seq_len of the records"
    KEEP_DTYPE = "leave out dtype"
    HDF5_FOR_UINT8 = "write HDF5: open_writer('train.h5', ..., dtype='uint8'); or pass dtype='uint16'"
    MAX_LINE = "if it is right, pass a larger bound, such as max_line='1GiB'"
    BOUND = "if it is right, set ZB_MAX_LINE={at} in the environment"
    FORCE = "force=True takes the position all the same"

    def about(self, at: str) -> str:
        """Return the cure, with its object where its words name that: `at`, or the names that this lists."""
        return self.format(at=at, names=tuple(at.split(",")))


def conversion_call(
    source: str | PathLike[str] | Iterable[str | PathLike[str]],
    target: str,
    destination: str | PathLike[str] = DESTINATION,
    **options: object,
) -> str:
    """Return the call of `convert` to type for a source: the command line makes the command of it.

    Parameters
    ----------
    source
        The path, or several.
    target
        The format that is written.
    destination
        The path that is written.
    options
        More arguments.
    """
    paths = [str(source)] if isinstance(source, str | PathLike) else [*map(str, source)]
    words = [repr(paths[0] if len(paths) == 1 else paths), repr(target), repr(str(destination))]
    for name, value in options.items():
        words.append(f"{name}={_plain(value)!r}")
    return f"convert({', '.join(words)})"


def _plain(value: object) -> object:
    """Return a value as a line to type has it."""
    return str(value) if isinstance(value, PathLike) else value


def merge_call(destination: object) -> str:
    """Return the call of `merge_parts` to type for a folder: the command line makes the command of it."""
    return f"merge_parts({str(destination)!r})"


class ZbError(Exception):
    """Base of every error raised on purpose.

    Attributes
    ----------
    remedy
        The cure, at the end of the text of the error; None: the text has it, or there is none.
    at
        The object of the remedy: a path; for `LEAVE_OUT` how much is left out, for `OTHER_KIND` the kind, for
        `RECORD_LENGTH` the tokens, for `DATASET` and `TEXT_COLUMN` the names that there are, for `IDS` the column, for
        `MISSING_PARTS` the numbers of the parts, for `OTHER_PART` the part, for `BOUND` a size.
    options
        The names of arguments in the message; the command line has a flag for each.
    """

    exit_code: ClassVar[int] = 1
    remedy: Remedy | None = None
    at: str = ""
    options: tuple[str, ...] = ()

    def __init__(
        self, *args: object, remedy: Remedy | None = None, at: object = "", options: Iterable[str] = ()
    ) -> None:
        super().__init__(*args)
        self.options = tuple(options)
        if remedy is not None:
            self.remedy = remedy
            self.at = str(at)

    @property
    def facts(self) -> str:
        """The message without the remedy."""
        return super().__str__()

    def __str__(self) -> str:
        return self.facts if self.remedy is None else f"{self.facts}; {self.remedy.about(self.at)}"


class ArgumentError(ZbError, ValueError):
    """An argument is not possible."""

    exit_code = 2


class FormatError(ZbError, ValueError):
    """The bytes on disk do not follow the format."""


class IncompleteError(FormatError):
    """The file or store is truncated, or its writer has not finished."""

    exit_code = 4


class ChecksumError(ZbError, ValueError):
    """The bytes on disk are not the bytes that were written."""

    exit_code = 3


class StateError(ZbError, ValueError):
    """A loader state belongs to another dataset, seed or order."""


class BackendError(ZbError, ValueError):
    """The backend or access that was asked for cannot serve this file."""


class UnavailableError(BackendError):
    """This machine lacks something the file needs: a lock, an HDF5 filter, a package, a server."""

    exit_code = 5


class UnverifiableError(BackendError):
    """Nothing is stored that the bytes could be compared with."""

    exit_code = 6


class ConvertError(ZbError, ValueError):
    """A source cannot be converted as asked."""


class ExistsError(ConvertError, FileExistsError):
    """The destination exists already."""

    remedy = Remedy.REPLACE


class NotFoundError(ZbError, FileNotFoundError):
    """There is no such file or folder."""

    exit_code = 2


class BatchIndexError(ZbError, IndexError):
    """No batch has this index."""


class ClosedError(ZbError, ValueError):
    """The reader or writer was used after `close`."""


_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?\s*", re.IGNORECASE)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ArgumentError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, found {value!r}")


def whole_number(name: str, value: object) -> int:
    """Return a value as a Python integer; raise `ArgumentError` with its name if it is not a whole number."""
    with suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    raise ArgumentError(f"{name} must be a whole number, found {value!r:.80}")


@overload
def positive(name: str, value: None) -> None: ...


@overload
def positive(name: str, value: int) -> int: ...


def positive(name: str, value: int | None) -> int | None:
    """Return None as it is, and a whole number of at least 1 as a Python integer; else raise `ArgumentError`."""
    if value is None:
        return None
    number = whole_number(name, value)
    if number < 1:
        raise ArgumentError(f"{name} must be at least 1, found {number}")
    return number


def require_positive(**values: int | None) -> None:
    """Raise `ArgumentError` unless each is None or a whole number of at least 1."""
    for name, value in values.items():
        positive(name, value)


def parse_size(text: str) -> int:
    """Return a number of bytes, at least 1: "4096", "64k", "512MB" (10**6), "1GiB" (2**30)."""
    match = _SIZE.fullmatch(text)
    number, prefix = (float(match[1]), match[2].lower()) if match else (0.0, "")
    size = int(number * (1024 if prefix[1:] else 1000) ** " kmgt".index(prefix[:1] or " "))
    if size < 1:
        raise ArgumentError(f"{text!r} is not a size such as 512MB or 1GiB")
    return size


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return "1 batch" or "1,234 batches".

    Parameters
    ----------
    count
        The number.
    one, many
        The word for one thing, and for several; by default the latter has an "s", or an "es" after "ch".
    """
    if count == 1:
        return f"{count:,} {one}"
    if many is None:
        many = one + ("es" if one.endswith("ch") else "s")
    return f"{count:,} {many}"


def format_bytes(value: float) -> str:
    """Return a number of bytes with a binary prefix: "1.5 GiB"."""
    for limit, prefix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {prefix}"
    return f"{value:.0f} bytes"
