"""The report of a check: what was found out about one file, and how it came out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from zb_hdf5.errors import ZbError


@dataclass
class ShardReport:
    """What was found out about one file.

    Attributes
    ----------
    sha256
        Computed from the bytes on disk; empty if they could not be read.
    fields
        Name -> sha256 of its values, computed from the bytes on disk.
    total_records
        Source records behind the batches, as the file says.
    document_count
        Documents of a document table; 0 of any other file.
    checks
        What they were compared with: "crc32", "sha256", "index", "documents", "pieces".
    missing
        What there would have to be to compare the tokens with, and how to get it; empty where they were compared.
    problem
        The first thing that is wrong, or None.
    """

    path: str
    backend: str = ""
    num_batches: int = 0
    token_count: int = 0
    sha256: str = ""
    total_records: int = 0
    document_count: int = 0
    checks: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    problem: ZbError | None = None

    @property
    def outcome(self) -> Outcome:
        """What can be said of the file."""
        if self.problem is not None:
            return Outcome.BAD
        return Outcome.UNVERIFIED if self.missing else Outcome.VERIFIED


class Outcome(StrEnum):
    """What a check of digests can end in."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"  # there was nothing to compare with
    BAD = "bad"
