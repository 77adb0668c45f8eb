"""The plan of a new field set: its parts, and the room that they take on the disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from zb_hdf5.console import counted, format_bytes
from zb_hdf5.spec import PAGE_BYTES
from zb_hdf5.store.set_facts import SetFacts

#: Bytes of the crc32 of a record, of each field, and of its mark.
ROW_BYTES: Final = 4
#: The facts and the index of a set, and its folders; a part has a claim beside it while it is written.
OTHER_FILES: Final = 5
FILES_OF_PART: Final = 2


@dataclass(frozen=True)
class FieldSetPlan:
    """The plan of a field set that is not made yet: `plan_field_set` makes it.

    Attributes
    ----------
    folder
        Its folder.
    facts
        Its facts. See `SetFacts`.
    free_bytes, free_inodes
        The room on its disk; None where the file system counts no files.
    """

    folder: Path
    facts: SetFacts
    free_bytes: int
    free_inodes: int | None

    @classmethod
    def of(cls, folder: Path, facts: SetFacts) -> Self:
        """Return the plan of a set, with the room that its disk has now."""
        there = folder
        while not there.exists():
            there = there.parent
        status = os.statvfs(there)
        return cls(folder, facts, status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)

    def __repr__(self) -> str:
        size = f"{format_bytes(self.num_bytes)} in {counted(self.num_parts, 'part')}"
        return f"{type(self).__name__}({str(self.folder)!r}, {self.facts.num_records:,} records, {size})"

    @property
    def num_parts(self) -> int:
        return self.facts.num_cells

    @property
    def num_bytes(self) -> int:
        """The bytes of all parts, about."""
        return self._bytes_of(self.facts.num_records, self.num_parts)

    @property
    def part_bytes(self) -> int:
        """The bytes of a part, about."""
        return self._bytes_of(min(self.facts.part_records, self.facts.num_records), 1)

    def _bytes_of(self, records: int, parts: int) -> int:
        """Return the bytes of records in parts: their values and rows, and the pages that each part begins with."""
        num_fields = len(self.facts.fields)
        rows = ROW_BYTES * (num_fields + 1)
        return records * (self.facts.record_bytes + rows) + parts * PAGE_BYTES * (2 * num_fields + 1)

    @property
    def num_files(self) -> int:
        """The files and folders, with the claims while all parts are written."""
        return FILES_OF_PART * self.num_parts + OTHER_FILES

    @property
    def lack(self) -> str:
        """The message of a disk that is too small; "": it has room."""
        if self.num_bytes > self.free_bytes:
            return f"{self.folder}: its values take {self.num_bytes:,} bytes, and only {self.free_bytes:,} are free"
        if self.free_inodes is not None and self.num_files > self.free_inodes:
            return f"{self.folder}: takes {self.num_files:,} files, and only {self.free_inodes:,} are free"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the plan for programs."""
        facts = self.facts
        return {
            "name": facts.name,
            "split": facts.split,
            "folder": str(self.folder),
            "fields": {field.name: field.to_json() for field in facts.fields},
            "records": facts.num_records,
            "record_tokens": facts.record_tokens,
            "parts": self.num_parts,
            "largest_part_bytes": self.part_bytes,
            "total_bytes": self.num_bytes,
            "inodes": self.num_files,
            "free": {"bytes": self.free_bytes, "inodes": self.free_inodes},
            "fits": not self.lack,
            "lack": self.lack,
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return the plan for people."""
        facts = self.facts
        unit = "documents" if facts.is_of_documents else f"records of {counted(facts.record_tokens, 'token')}"
        free_files = "an uncounted number" if self.free_inodes is None else f"{self.free_inodes:,}"
        lines = [
            ("would make", f"{self.folder}: {', '.join(field.name for field in facts.fields)}"),
            ("records", f"{facts.num_records:,} {unit}, {format_bytes(facts.record_bytes)} each"),
            ("parts", f"{self.num_parts:,}, of {format_bytes(self.part_bytes)}"),
            ("disk", f"{format_bytes(self.num_bytes)} of {format_bytes(self.free_bytes)} that are free"),
            ("files", f"{counted(self.num_files, 'inode')} of {free_files} that are free"),
            ("does not fit", self.lack),
        ]
        return [(name, text) for name, text in lines if text]
