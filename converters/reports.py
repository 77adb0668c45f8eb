"""The report of a conversion: counts that add up, for programs and for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from zb_hdf5 import ShardEntry, ShardIndex, StoreMeta
from zb_hdf5.console import counted, format_bytes, format_count
from zb_hdf5.converters.documents import DocumentCounts
from zb_hdf5.converters.journal import WHOLE, Part
from zb_hdf5.converters.shard import FinishedShard
from zb_hdf5.converters.source import TokenCounts
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import combine_sha256

Lines = list[tuple[str, str]]


class Kept(NamedTuple):
    """The part that a resumed conversion did not write again: shards, their tokens, and the time to check them."""

    shards: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, finished: Iterable[FinishedShard], seconds: float) -> Self:
        """Count shards that were found finished."""
        tokens = [done.token_count for done in finished]
        return cls(len(tokens), sum(tokens), seconds if tokens else 0.0)


NOTHING_KEPT: Final = Kept(0, 0, 0.0)


@dataclass(frozen=True)
class Report:
    """The report of a conversion to batches.

    Attributes
    ----------
    destination
        The result; of a part of a conversion the `.partial` folder that it belongs to.
    shards
        Those of this conversion, or of this part.
    max_token
        None: not known, of a result that was there already.
    token_counts
        Counts of the whole conversion, also in the report of a part.
    shuffle
        The way in which the records were read, and the reason.
    kept
        The part that an earlier run had written.
    left_behind
        Fields and documents that the target does not hold; "": none.
    documents, packing, batches_of_split, documents_kept
        For a conversion of documents: their counts, how they became rows, and the tokens that were not made again.
    """

    destination: Path
    meta: StoreMeta
    shards: list[ShardEntry]
    max_token: int | None
    token_counts: TokenCounts
    shuffle: str
    seconds: float
    part: Part = WHOLE
    kept: Kept = NOTHING_KEPT
    left_behind: str = ""
    documents: DocumentCounts | None = None
    packing: str = ""
    batches_of_split: dict[str, int] | None = None
    documents_kept: int = 0

    @property
    def num_batches(self) -> int:
        return sum(shard.num_batches for shard in self.shards)

    @property
    def tokens_stored(self) -> int:
        return self.num_batches * self.meta.batch_tokens

    @property
    def tokens_written(self) -> int:
        """Those that this run has written."""
        return self.tokens_stored - self.kept.tokens

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of this run, without the time for checking kept shards; None if it wrote nothing."""
        return self.tokens_written / (self.seconds - self.kept.seconds) if self.tokens_written else None

    @property
    def sha256(self) -> str:
        """Digest of the one file, or over the digests of the shards."""
        one_file = self.destination.is_file()
        return self.shards[0].sha256 if one_file else combine_sha256(shard.sha256 for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        counts, documents = self.token_counts, {}
        if self.documents is not None:
            documents = _documents_json(self.documents, self.documents_kept, self.seconds)
            documents |= {"packing": self.packing, "batches_of_split": self.batches_of_split}
        return {
            "path": str(self.destination),
            **({} if self.part == WHOLE else {"part": list(self.part)}),
            "batch_size": self.meta.batch_size,
            "seq_len": self.meta.seq_len,
            "dtype": self.meta.dtype.name,
            "num_batches": self.num_batches,
            "num_shards": len(self.shards),
            "shards_kept": self.kept.shards,
            "shards_written": len(self.shards) - self.kept.shards,
            "tokens_in": counts.tokens_in,
            "tokens_stored": self.tokens_stored,
            "tokens_written": self.tokens_written,
            "tokens_padded": counts.padded,
            "padding_rows": counts.padding_rows,
            "tokens_dropped": counts.dropped,
            "max_token": self.max_token,
            "shuffle": self.shuffle,
            "sha256": self.sha256,
            "extension": self._extension(),
            "left_behind": self.left_behind,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": self.tokens_per_second and round(self.tokens_per_second),
            **documents,
        }

    def lines(self) -> Lines:
        """Return the report for people."""
        counts, meta = self.token_counts, self.meta
        padded = f" + {counts.padded:,} padded" if counts.padded else ""
        shards = "1 file" if self.destination.is_file() else _shards(len(self.shards), self.kept.shards)
        tokens = f"{counts.tokens_in:,} in{padded} = {self.tokens_stored:,} stored + {_dropped(counts)} dropped"
        if self.part != WHOLE:
            tokens = f"{self.tokens_stored:,} stored by part {self.part.job} of {self.part.num_jobs}"
        return [
            ("wrote" if self.tokens_written else "there is", f"{self.destination} ({shards})"),
            ("batches", f"{self.num_batches:,} of {meta.batch_size:,} x {meta.seq_len:,} {meta.dtype.name}"),
            ("tokens", tokens),
            *([("padding", self._padding())] if counts.padded and self.part == WHOLE else []),
            *([("shuffle", self.shuffle)] if self.documents is None else []),
            ("sha256", self.sha256),
            *[("note", note) for note in (self._extension(), self.left_behind) if note],
            *(self._documents_lines() if self.documents else [("speed", self._speed())]),
        ]

    def _documents_lines(self) -> Lines:
        documents = self.documents or DocumentCounts()
        splits = ", ".join(
            f"{counted(count, 'batch', 'batches')} {split}" for split, count in (self.batches_of_split or {}).items()
        )
        return [
            ("documents", f"{documents.documents:,}, {self.packing} packing: {splits}"),
            ("speed", _documents_speed(documents, self.documents_kept, self.seconds)),
            *documents.dropped.lines(),
        ]

    def _speed(self) -> str:
        """Rate the tokens that this run wrote, not the shards that it kept."""
        rate = self.tokens_per_second
        if rate is None:
            return f"{self.seconds:.2f} s, nothing was left to write"
        checks = f" ({self.kept.seconds:.2f} s to check the kept shards)" if self.kept.shards else ""
        bytes_rate = format_bytes(rate * self.meta.dtype.itemsize)
        return f"{self.seconds:.2f} s{checks}, {format_count(rate)}tok/s, {bytes_rate}/s"

    def _extension(self) -> str | None:
        """Name the tools that do not read such files; None if all do."""
        notes = {FORMATS[shard.backend].uint16_note for shard in self.shards} - {""}
        if self.meta.dtype.name == "uint16" and notes:
            return f"{'; '.join(sorted(notes))}; --dtype uint32 writes what all of them read"
        return None

    def _padding(self) -> str:
        """Return the share of padding in the store, and its kinds."""
        rows = self.token_counts.padding_rows
        in_rows = self.token_counts.padded - rows * self.meta.seq_len
        kinds = {f"{in_rows:,} at the ends of rows": in_rows, f"{rows:,} whole rows, which fill the last batch": rows}
        share = self.token_counts.padded / self.tokens_stored
        return f"{share:.2%} of the stored tokens: {', '.join(text for text, count in kinds.items() if count)}"


@dataclass(frozen=True)
class StreamReport:
    """The report of a conversion to streams; `tokens_kept` were not made again."""

    destination: Path
    index: ShardIndex
    counts: DocumentCounts
    seconds: float
    shards_kept: int = 0
    tokens_kept: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        index, counts = self.index, self.counts
        return {
            "path": str(self.destination),
            "dtype": index.meta.dtype.name,
            "num_shards": len(index.shards),
            "shards_kept": self.shards_kept,
            "shards_written": len(index.shards) - self.shards_kept,
            "tokens_in": counts.tokens.tokens_in,
            "tokens_stored": index.token_count,
            "tokens_dropped": counts.tokens.dropped,
            "sha256": index.sha256,
            "seconds": round(self.seconds, 3),
            **_documents_json(counts, self.tokens_kept, self.seconds),
        }

    def lines(self) -> Lines:
        """Return the report for people."""
        index, counts = self.index, self.counts.tokens
        val = sum(shard.split != "train" for shard in index.shards)
        shards = _shards(len(index.shards), self.shards_kept)
        return [
            ("wrote", f"{self.destination} ({shards}{f', {val:,} of them val' if val else ''})"),
            ("documents", f"{index.meta.document_count:,}"),
            ("tokens", f"{counts.tokens_in:,} in = {index.token_count:,} stored + {_dropped(counts)} dropped"),
            ("sha256", index.sha256),
            ("speed", _documents_speed(self.counts, self.tokens_kept, self.seconds)),
            *self.counts.dropped.lines(),
        ]


@dataclass(frozen=True)
class Done:
    """The report of a conversion whose result was there already."""

    destination: Path

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {"path": str(self.destination), "done": True}

    def lines(self) -> Lines:
        """Return the report for people."""
        return [("there is", f"{self.destination} already, made of these files in this way: nothing to do")]


def _shards(count: int, kept: int) -> str:
    return f"kept {kept:,} shards, wrote {count - kept:,}" if kept else counted(count, "shard")


def _dropped(counts: TokenCounts) -> str:
    return " + ".join(f"{tokens:,} {reason}" for reason, tokens in counts.dropped.items()) or "0"


def _documents_json(counts: DocumentCounts, kept: int, seconds: float) -> dict[str, Any]:
    return {
        "documents": counts.documents,
        "documents_dropped": counts.dropped.counts,
        "documents_dropped_first": counts.dropped.first,
        "tokens_kept": kept,
        "tokens_per_second": round((counts.tokens.tokens_in - kept) / seconds),
    }


def _documents_speed(counts: DocumentCounts, kept: int, seconds: float) -> str:
    """Rate the tokens that this run made of documents, not those of an earlier run."""
    tokens = counts.tokens.tokens_in - kept
    note = f" (kept {kept:,} tokens, tokenized {tokens:,})" if kept else ""
    return f"{seconds:.2f} s{note}, {format_count(tokens / seconds)}tok/s"
