"""`ReadAs`: all that a user tells about files that do not tell how they are read."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zb_hdf5.errors import ArgumentError
from zb_hdf5.packages import LaterModule

if TYPE_CHECKING:  # which the help of the commands does not need
    import numpy as np
else:
    np = LaterModule("numpy")

#: The axes of a dataset of another program that holds batches, and of an array that holds records.
BATCH_AXES: Final = "batch,record,token"
RECORD_AXES: Final = "record,token"
AXES: Final = (BATCH_AXES, RECORD_AXES)
#: The treatments of rows that were never written.
FILL: Final = "fill"
UNWRITTEN: Final = (FILL, "drop")
#: The dtypes of ids in files without a header, by which they are named: little-endian.
SOURCE_DTYPES: Final = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


class Argument(NamedTuple):
    """An argument of `ReadAs` as an option of commands.

    Attributes
    ----------
    kind
        The kind of its values: "text", "natural", "channels" or "file"; or the words that may be given.
    help
        One sentence.
    words
        The default in the help; "": it is not named there.
    """

    kind: str | tuple[str, ...]
    help: str
    words: str = ""


def _declared(argument: Argument, default: Any = None) -> Any:
    """Return a field that declares an argument, for programs and for the commands."""
    return field(default=default, metadata={"argument": argument})


@dataclass(frozen=True, repr=False)
class ReadAs:
    """How files are read that do not tell it, such as files of other programs. Nothing is guessed.

    Every reader, loader and check takes it as `read_as=`. A store needs none of it.

    Parameters
    ----------
    dataset
        Name of an integer dataset in an HDF5 file of another program, or in each file of a folder of them: of three
        axes it holds batches, of two records (in batches of `batch_size`, by default 1), of one a token stream. None:
        the only integer dataset of such a file, or one of a known name with fields beside it.
    axes
        "batch,record,token": the three axes of the dataset are these. "record,token": so are two axes, of a dataset or
        of `.npy` files; their rows of one token or two are refused else. None: a dataset whose second axis has two to
        four entries is refused, unless the labels of its axes are these (see docs/formats.md).
    channel
        Entry of the second of three axes that has the ids, such as 0 of ids, mask and labels: each item is then one
        record. None: that axis has no channels.
    field_channels
        Entries that have fields, such as `{"loss_mask": 1, "labels": 2}`; they need `channel`.
    source_dtype
        Dtype of the ids in a file without a header, or in a folder of them, such as the `train.bin` of nanoGPT or the
        `.npy` of OLMo: "uint16", "uint32", "int32" or another integer. It is never guessed: ids of another dtype are
        other ids, and not always an error. Such a file may have any suffix. Refused for files that have a header.
    skip_bytes
        Bytes of each such file before its first id.
    unwritten
        Rows of an HDF5 dataset that no program has written, of the tokens or of a field: "fill" takes the fill value of
        the dataset, "drop" leaves out each row that was not written in whole. None: they are refused, but for the last
        tokens of a stream, which ends before them, with a note.
    digests
        The file that `write_digests` has made of files of another trainer or program, which hold none: `verify`
        compares them with it, and whatever `verify` is, the size of each file and its first read. States fit with and
        without it.

    Raises
    ------
    ArgumentError
        If a value is not possible, or two of them contradict each other.

    Examples
    --------
    >>> ReadAs(source_dtype="uint16")
    ReadAs(source_dtype='uint16')
    """

    dataset: str | None = _declared(
        Argument("text", "Dataset of an HDF5 file of another program.", words="the only one of integers")
    )
    axes: str | None = _declared(Argument(AXES, "Axes of the dataset: no entry is a mask or labels."))
    channel: int | None = _declared(
        Argument("natural", "Entry of the second axis of the dataset that has the ids, such as 0.")
    )
    field_channels: Mapping[str, int] = field(
        default_factory=dict,
        hash=False,
        metadata={"argument": Argument("channels", "Entry that has a field, such as loss_mask=1.")},
    )
    source_dtype: str | None = _declared(Argument("text", "Dtype of ids in files that do not name it, such as uint16."))
    skip_bytes: int = _declared(Argument("natural", "Bytes of each such file before its ids."), default=0)
    unwritten: str | None = _declared(
        Argument(UNWRITTEN, "Rows that were never written: take a fill value, or drop them.")
    )
    digests: str | os.PathLike[str] | None = _declared(  # noqa: RUF009 - which takes the type for a mutable one
        Argument("file", "The file of the digests that were made of files that hold none.")
    )

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self is AS_STORED:
            return "AS_STORED"
        return _with, (self.given,)  # a few bytes: the copy of a corpus for each worker has it

    def __post_init__(self) -> None:
        if self.digests == "" or not isinstance(self.digests, str | os.PathLike | None):
            raise ArgumentError(f"digests must be the path of a file, found {self.digests!r}", options=["digests"])
        self._require_dataset()
        self._require_ids_without_header()
        if self.lacks_header and self.names_dataset:
            raise ArgumentError(
                "source_dtype is for files without a header, dataset, axes, channel and unwritten are for HDF5 files: "
                "pass either",
                options=["source_dtype", "dataset", "axes", "channel", "unwritten"],
            )

    def _require_dataset(self) -> None:
        """Check what names a dataset of HDF5, and take a copy of the channels, in the order of their names."""
        if not isinstance(self.dataset, str | None):
            raise ArgumentError(f"dataset must be a name, found {self.dataset!r}", options=["dataset"])
        if self.axes not in (None, *AXES):
            raise ArgumentError(f"axes must be {' or '.join(AXES)}, found {self.axes!r}", options=["axes"])
        if self.unwritten not in (None, *UNWRITTEN):
            raise ArgumentError(f"unwritten must be 'fill' or 'drop', found {self.unwritten!r}", options=["unwritten"])
        if not isinstance(self.field_channels, Mapping):
            raise ArgumentError(
                f"field_channels must be names and their channels, found {self.field_channels!r}",
                options=["field_channels"],
            )
        if self.axes is not None and self.channel is not None:
            raise ArgumentError("pass either axes or channel, not both", options=["axes", "channel"])
        if self.field_channels and self.channel is None:
            raise ArgumentError(
                "field_channels needs channel, which has the tokens", options=["field_channels", "channel"]
            )
        entries = sorted(self.field_channels.items())
        checked = {str(name): _entry("field_channels", number) for name, number in entries}
        object.__setattr__(self, "field_channels", checked)
        if self.channel is not None:
            object.__setattr__(self, "channel", _entry("channel", self.channel))
        self._require_own_entries()

    def _require_own_entries(self) -> None:
        """Refuse an entry that two are to have: the ids and a field, or two fields."""
        found: dict[int, str] = {} if self.channel is None else {self.channel: "the ids"}
        for name, number in self.field_channels.items():
            if number in found:
                raise ArgumentError(
                    f"field_channels must be entries of their own, found {name!r} in {number}, which has "
                    f"{found[number]}",
                    options=["field_channels", "channel"],
                )
            found[number] = f"the field {name!r}"

    def _require_ids_without_header(self) -> None:
        """Check what names the ids of files that have no header."""
        if self.source_dtype is None:
            if self.skip_bytes:
                raise ArgumentError(
                    f"skip_bytes={self.skip_bytes!r} is for files without a header: pass source_dtype too",
                    options=["skip_bytes", "source_dtype"],
                )
        elif self.source_dtype not in SOURCE_DTYPES:
            raise ArgumentError(
                f"source_dtype must be one of {', '.join(SOURCE_DTYPES)}, found {self.source_dtype!r}",
                options=["source_dtype"],
            )
        if isinstance(self.skip_bytes, bool) or not isinstance(self.skip_bytes, int) or self.skip_bytes < 0:
            raise ArgumentError(
                f"skip_bytes must be a whole number of at least 0, found {self.skip_bytes!r}", options=["skip_bytes"]
            )

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that have another value than their default."""
        defaults = {"skip_bytes": 0, "field_channels": {}}
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value != defaults.get(name)}

    @property
    def names_dataset(self) -> bool:
        """Whether a dataset, its axes or its rows are named: the path is then an HDF5 file of another program.

        Axes of records may be the axes of a `.npy` file, too: see `needs_hdf5`.
        """
        return (self.dataset, self.axes, self.channel, self.unwritten) != (None, None, None, None)

    @property
    def needs_hdf5(self) -> bool:
        """Whether anything is named that HDF5 files alone have; other files have records, too."""
        named = (self.dataset, self.axes, self.channel, self.unwritten)
        return self.names_dataset and named != (None, RECORD_AXES, None, None)

    @property
    def lacks_header(self) -> bool:
        """Whether the files have no header, and the ids are named."""
        return self.source_dtype is not None

    @property
    def ids_dtype(self) -> np.dtype[Any]:
        """The dtype of ids without a header."""
        return np.dtype(self.source_dtype).newbyteorder("<")

    def __repr__(self) -> str:
        return f"ReadAs({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


#: The arguments of `ReadAs` by their names, as options of commands.
ARGUMENTS: Final[dict[str, Argument]] = {each.name: each.metadata["argument"] for each in fields(ReadAs)}


def _entry(name: str, number: Any) -> int:
    """Return the number of a channel; `ArgumentError` if it is none."""
    try:
        found = operator.index(number)
    except TypeError:
        found = -1
    if found < 0 or isinstance(number, bool):  # True is a switch, and not the entry 1
        raise ArgumentError(f"{name} must be whole numbers from 0 on, found {number!r}", options=[name])
    return found


def _with(given: dict[str, Any]) -> ReadAs:
    """Return a copy that was pickled as its arguments."""
    return ReadAs(**given)


#: The files say all that is needed.
AS_STORED: Final = ReadAs()


def is_a_stream(path: str | os.PathLike[str], axes: str) -> ArgumentError:
    """Return the error of axes that are named of a token stream."""
    return ArgumentError(
        f"{os.fspath(path)}: is a token stream, which has one axis: leave out axes={axes!r}", options=["axes"]
    )


def require_read_as(read_as: object) -> None:
    """Raise `ArgumentError` for anything but a `ReadAs`, such as a dictionary of its arguments."""
    if not isinstance(read_as, ReadAs):
        raise ArgumentError(f"read_as must be a ReadAs, such as ReadAs(dataset='tokens'), found {read_as!r:.80}")
