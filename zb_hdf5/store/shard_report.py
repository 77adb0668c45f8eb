"""The report on one file whose digests were compared, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from zb_hdf5.errors import ZbError


@dataclass
class ShardReport:
    """The result of the check of one file.

    Attributes
    ----------
    sha256
        Computed from the bytes on disk; empty if they could not be read.
    fields
        Name -> sha256 of its values, computed from the bytes on disk.
    total_records
        Source records of the batches, as the file has it.
    document_count
        Documents of a document table; 0 of any other file.
    checks
        The digests that agreed: "crc32", "sha256", "index", "documents", "pieces", and "field NAME" of each field.
    missing
        The digest that is missing, and the way to get it; empty if the tokens were compared, and readers can do so.
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

    def __repr__(self) -> str:
        reason = "" if self.problem is None and not self.missing else f": {self.problem or self.missing}"
        return f"{type(self).__name__}({self.path!r}, {self.token_count:,} tokens, {self.outcome.value}{reason})"

    @property
    def outcome(self) -> Outcome:
        """The verdict on the file."""
        if self.problem is not None:
            return Outcome.BAD
        return Outcome.UNVERIFIED if self.missing else Outcome.VERIFIED


class Outcome(StrEnum):
    """The verdicts of a check of digests."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"  # there was nothing to compare with
    BAD = "bad"
