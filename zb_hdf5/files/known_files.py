"""The files of a store that were open, or looked at, by their numbers: the identity of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.identity import Device, FileIdentity, Identity

#: Identities that are pickled as they are; more of them as arrays.
FEW: Final = 16
#: The largest number that the difference of two int64 may be.
_MAX_DIFFERENCE: Final = 2**63 - 1


class _Packed(NamedTuple):
    """The identities of files of this machine that were found among the same mounts, in few bytes.

    Attributes
    ----------
    mounts
        As `Device` has it.
    least
        The least key of a file, and the least size, time, inode and device.
    columns
        The differences of all values from these, each column in the smallest dtype. The keys ascend.
    """

    mounts: str
    least: tuple[int, ...]
    columns: tuple[npt.NDArray[Any], ...]

    @classmethod
    def of(cls, mounts: str, known: Mapping[int, FileIdentity]) -> _Packed:
        """Return the identities of some files."""
        keys = sorted(known)
        files = [known[key] for key in keys]
        columns = (
            keys,
            [each.num_bytes for each in files],
            [each.modified_ns for each in files],
            [each.inode for each in files],
            [each.device.number for each in files],
        )
        least, differences = zip(*map(_differences, columns), strict=True)
        return cls(mounts, least, differences)

    def get(self, key: int) -> FileIdentity | None:
        """Return the identity of a file; None: it is not known."""
        wanted = key - self.least[0]
        if not 0 <= wanted <= int(self.columns[0][-1]):
            return None
        place = int(self.columns[0].searchsorted(wanted))
        return self._at(place) if self.columns[0][place] == wanted else None

    def items(self) -> Iterable[tuple[int, FileIdentity]]:
        """Yield the key and the identity of each file."""
        for place, key in enumerate(self.columns[0].tolist()):
            yield key + self.least[0], self._at(place)

    def _at(self, place: int) -> FileIdentity:
        values = (int(column[place]) + base for column, base in zip(self.columns, self.least, strict=True))
        _, num_bytes, modified_ns, inode, device = values
        return FileIdentity(num_bytes, modified_ns, inode, Device(device, self.mounts))


def _differences(values: list[int]) -> tuple[int, npt.NDArray[Any]]:
    """Return the least of some numbers, and the differences from it."""
    array = np.array(values)
    least = int(array.min())
    most = int(array.max()) - least
    if most > _MAX_DIFFERENCE:
        array = array.astype(object)
    return least, (array - least).astype(np.min_scalar_type(most))


class KnownFiles:
    """The identities of files by their numbers. A pickled copy of many has about 20 bytes of each.

    Parameters
    ----------
    known
        Those that are known; that of the documents of a file has the key -1 - number. None: none are.
    packed
        Those that another process has packed.
    """

    def __init__(self, known: dict[int, Identity] | None = None, *packed: _Packed) -> None:
        self._known = known or {}
        self._packed = packed

    def get(self, number: int) -> Identity | None:
        """Return the identity of a file; None: it is not known."""
        if number in self._known or not self._packed:
            return self._known.get(number)
        return next((each for packed in self._packed if (each := packed.get(number)) is not None), None)

    def documents(self, number: int) -> Identity | None:
        """Return the identity of the file of the documents of a file; None: there is none."""
        return self.get(-1 - number)

    def note(self, number: int, identity: Identity | None) -> None:
        """Take the identity of a file that is open; None: it has none."""
        if identity is not None:
            self._known[number] = identity

    def note_all(self, files: Mapping[int, Identity | None], documents: Mapping[int, Identity | None]) -> None:
        """Take the identities of many files, and of the files of their documents; None: there is none."""
        self._known |= {number: each for number, each in files.items() if each is not None}
        self._known |= {-1 - number: each for number, each in documents.items() if each is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        known = {key: each for packed in self._packed for key, each in packed.items()} | self._known
        if len(known) <= FEW:
            return KnownFiles, (known,)
        others: dict[int, Identity] = {}
        by_mounts: dict[str, dict[int, FileIdentity]] = {}
        for key, each in known.items():
            if isinstance(each, FileIdentity):
                by_mounts.setdefault(each.device.mounts, {})[key] = each
            else:
                others[key] = each
        return KnownFiles, (others, *(_Packed.of(*each) for each in by_mounts.items()))
