"""The choice of a dataset in an HDF5 file of another program, as a caller names it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self, TypedDict

from zb_hdf5.errors import ArgumentError

#: The axes of a dataset of another program that holds batches.
AXES: Final = "batch,record,token"
#: What becomes of rows that were never written.
FILL: Final = "fill"
UNWRITTEN: Final = (FILL, "drop")


class DatasetArguments(TypedDict):
    """The arguments of `open_reader` for an HDF5 file of another program."""

    dataset: str | None
    axes: str | None
    channel: int | None
    field_channels: Mapping[str, int] | None
    unwritten: str | None


class DatasetChoice(NamedTuple):
    """A dataset of another program, and the sense of its axes.

    Attributes
    ----------
    name
        The dataset of the tokens; None: the only one, or that of a known name with fields beside it.
    axes
        "batch,record,token" if the three axes are these; None: a look tells whether the second one has records.
    channel
        The entry of the second of three axes that has the tokens; None: the axes have no channels.
    field_channels
        The names of fields, and the entries that have their values.
    unwritten
        "fill": rows that were never written have the fill value of the dataset. "drop": rows that were not written in
        whole are left out. None: they are refused, but for the last values of a stream, which ends before them.
    """

    name: str | None = None
    axes: str | None = None
    channel: int | None = None
    field_channels: tuple[tuple[str, int], ...] = ()
    unwritten: str | None = None

    @classmethod
    def of(
        cls,
        dataset: str | None = None,
        axes: str | None = None,
        channel: int | None = None,
        field_channels: Mapping[str, int] | None = None,
        unwritten: str | None = None,
    ) -> Self:
        """Return the choice that arguments of `open_reader` make; `ArgumentError` if they make none."""
        if axes not in (None, AXES):
            raise ArgumentError(f"axes must be {AXES}, found {axes!r}", options=["axes"])
        if unwritten not in (None, *UNWRITTEN):
            raise ArgumentError(f"unwritten must be 'fill' or 'drop', found {unwritten!r}", options=["unwritten"])
        channels = {} if field_channels is None else field_channels
        if not isinstance(channels, Mapping):
            raise ArgumentError(
                f"field_channels must be names and their channels, found {channels!r}", options=["field_channels"]
            )
        if axes is not None and channel is not None:
            raise ArgumentError("pass either axes or channel, not both", options=["axes", "channel"])
        if channels and channel is None:
            raise ArgumentError(
                "field_channels needs channel, which has the tokens", options=["field_channels", "channel"]
            )
        entries = tuple(sorted((str(name), _entry("field_channels", number)) for name, number in channels.items()))
        return cls(dataset, axes, None if channel is None else _entry("channel", channel), entries, unwritten)

    @property
    def is_made(self) -> bool:
        """Whether anything is chosen: then the path is an HDF5 file of another program."""
        return self != ANY_DATASET

    @property
    def arguments(self) -> DatasetArguments:
        """The arguments of `open_reader` that make it."""
        return DatasetArguments(
            dataset=self.name,
            axes=self.axes,
            channel=self.channel,
            field_channels=self.fields,
            unwritten=self.unwritten,
        )

    @property
    def fields(self) -> dict[str, int]:
        """The channels of fields, by their names."""
        return dict(self.field_channels)

    @property
    def in_words(self) -> str:
        """The first argument that was given, as a call has it."""
        names = {"dataset": self.name, "axes": self.axes, "channel": self.channel, "unwritten": self.unwritten}
        return next((f"{name}={value!r}" for name, value in names.items() if value is not None), "")


def _entry(name: str, number: Any) -> int:
    """Return the number of a channel; `ArgumentError` if it is none."""
    try:
        found = operator.index(number)
    except TypeError:
        found = -1
    if found < 0:
        raise ArgumentError(f"{name} must be whole numbers from 0 on, found {number!r}", options=[name])
    return found


#: Nothing is chosen.
ANY_DATASET: Final = DatasetChoice()
