"""The report of a conversion: counts that add up, for programs and for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from zb_hdf5 import ShardEntry, ShardIndex, StoreMeta
from zb_hdf5.console import counted, format_bytes, format_count, format_seconds
from zb_hdf5.converters.batch_source import TokenCounts
from zb_hdf5.converters.conversion import WHOLE, ShardRange
from zb_hdf5.converters.journal import NOTHING_KEPT, KeptShards
from zb_hdf5.files.listing import counts_of_left_out, left_out_in_words
from zb_hdf5.spec import DTYPE_BY_NAME, NO_CODEC, STREAM_LAYOUT, combine_sha256, dtype_of_ids
from zb_hdf5.store.format_list import FORMATS

#: Bytes that a token of uint32 has more than one of uint16.
UINT16_SAVES: Final = 2


@dataclass(frozen=True)
class Report:
    """The report of a conversion to batches, or to streams.

    Attributes
    ----------
    destination
        The result; of a part of a conversion the `.partial` folder that it belongs to.
    meta
        The shape and dtype of the result.
    shards
        Those of this conversion, or of this part.
    counts
        Counts of the whole conversion, also in the report of a part.
    shuffle
        The way in which the records were read, and the reason.
    max_token
        None: not known.
    kept
        The part that an earlier run had written.
    left_behind
        Fields and documents that the target does not hold; "": none.
    packing
        The way in which documents became rows; "": they were kept, or there were none.
    documents_kept
        The tokens of documents that were not made again.
    encoder
        The file that encoded the text in place of the tokenizer, whose digest it has; "": the tokenizer itself.
    lacks_vocab_size
        Whether a vocabulary size of at most 65,536 would have stored uint16 instead of uint32.
    dtype
        The dtype of the ids in the files, where a store has no such dtype; "": that of `meta`.
    left_out
        Other files of tokens or text in the folders of the source.
    field_sets
        The names and splits of the field sets that were copied with the tokens.
    """

    destination: Path
    meta: StoreMeta
    shards: list[ShardEntry]
    counts: TokenCounts
    seconds: float
    shuffle: str = "none"
    max_token: int | None = None
    part: ShardRange = WHOLE
    kept: KeptShards = NOTHING_KEPT
    left_behind: str = ""
    packing: str = ""
    documents_kept: int = 0
    encoder: str = ""
    lacks_vocab_size: bool = False
    dtype: str = ""
    left_out: tuple[Path, ...] = ()
    field_sets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """One line: `to_json()` has all figures, and `lines()` has them for people."""
        facts = ", ".join(text for name, text in self.lines() if name in ("batches", "tokens"))
        return f"{type(self).__name__}({str(self.destination)!r}, {counted(len(self.shards), 'shard')}: {facts})"

    @property
    def num_batches(self) -> int:
        return sum(shard.num_batches for shard in self.shards)

    @property
    def batches_of_split(self) -> dict[str, int]:
        """The number of batches of each split."""
        splits = dict.fromkeys(shard.split for shard in self.shards)
        return {name: sum(shard.num_batches for shard in self.shards if shard.split == name) for name in splits}

    @property
    def tokens_stored(self) -> int:
        return sum(shard.token_count for shard in self.shards)

    @property
    def tokens_written(self) -> int:
        """Those that this run has written."""
        return self.tokens_stored - self.kept.tokens

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of this run, without the time for checking kept shards; None if it wrote nothing."""
        made = self.counts.tokens_in - self.documents_kept if self.counts.documents else self.tokens_written
        return made / (self.seconds - self.kept.seconds) if made else None

    @property
    def sha256(self) -> str:
        """Digest of the one file, or over the digests of the shards."""
        one_file = self.destination.is_file()
        return self.shards[0].sha256 if one_file else combine_sha256(shard.sha256 for shard in self.shards)

    @property
    def _is_split(self) -> bool:
        """Whether batches are held out."""
        return not self._is_stream and len(self.batches_of_split) > 1

    @property
    def _is_stream(self) -> bool:
        return self.meta.layout == STREAM_LAYOUT

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        counts = self.counts
        meta = self.meta
        found: dict[str, Any] = {"path": str(self.destination)}
        if self.part != WHOLE:
            found["part"] = list(self.part)
        if not self._is_stream:
            found |= {"batch_size": meta.batch_size, "seq_len": meta.seq_len, "num_batches": self.num_batches}
        found |= {
            "dtype": self.dtype or meta.dtype.name,
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
            "uint16_would_save_bytes": self._uint16_would_save(),
            "shuffle": self.shuffle,
            "sha256": self.sha256,
            "extension": self._extension(),
            "left_behind": self.left_behind,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": self.tokens_per_second and round(self.tokens_per_second),
        }
        if counts.documents:
            found |= {
                "documents": counts.documents,
                "documents_dropped": counts.documents_dropped.counts,
                "documents_dropped_first": counts.documents_dropped.first,
                "documents_lossy": counts.documents_lossy,
                "characters_lost": counts.characters_lost,
                "tokens_kept": self.documents_kept,
            }
        if self.field_sets:
            found["field_sets"] = list(self.field_sets)
        if self.encoder:
            found["encoder"] = self.encoder
        if self.packing:
            found["packing"] = self.packing
        if self.packing or self._is_split:
            found["batches_of_split"] = self.batches_of_split
        return found | counts_of_left_out(self.left_out)

    def lines(self) -> list[tuple[str, str]]:
        """Return the report for people."""
        counts = self.counts
        meta = self.meta
        is_whole = self.part == WHOLE
        found = [("wrote" if self.tokens_written else "present", f"{self.destination} ({self._num_shards()})")]
        if not self._is_stream:
            shape = f"{self.num_batches:,} of {meta.batch_size:,} x {meta.seq_len:,} {meta.dtype.name}"
            found.append(("batches", shape))
        if self._is_split and not counts.documents:
            splits = (f"{counted(count, 'batch')} {split}" for split, count in self.batches_of_split.items())
            found.append(("splits", ", ".join(splits)))
        found.append(("tokens", self._tokens()))
        if counts.padded and is_whole:
            padding = (
                f"{counts.padded / max(1, self.tokens_stored):.2%} of the stored tokens, "
                f"{counted(counts.padding_rows, 'whole row')} to fill the last batch among them"
            )
            found.append(("padding", padding))
        if counts.documents:
            found.append(("documents", self._documents()))
        if self.encoder:
            found.append(("encoder", f"{self.encoder}, which has the digest of the tokenizer"))
        if self.tokens_written and not counts.documents:
            found.append(("shuffle", self.shuffle))
        if self.field_sets:
            found.append(("field sets", ", ".join(self.field_sets)))
        found.append(("sha256", self.sha256))
        left_out = left_out_in_words(self.left_out)
        notes = (self._lost(), left_out, self._extension(), self.left_behind, self._smaller(), self._no_shard())
        found += [("note", note) for note in notes if note]
        found.append(("speed", self._speed()))
        if counts.documents:
            found += counts.documents_dropped.lines()
        return found

    def _num_shards(self) -> str:
        """Return how many shards there are, and how many of them an earlier run had written."""
        kept = self.kept.shards
        if kept:
            return f"kept {counted(kept, 'shard')}, wrote {len(self.shards) - kept:,}"
        return counted(len(self.shards), "shard")

    def _tokens(self) -> str:
        """Return the balance of the tokens; of a part those that it has stored."""
        if self.part != WHOLE:
            return f"{self.tokens_stored:,} stored by part {self.part.job} of {self.part.num_jobs}"
        counts = self.counts
        padded = f" + {counts.padded:,} padded" if counts.padded else ""
        dropped = " + ".join(f"{tokens:,} {reason}" for reason, tokens in counts.dropped.items()) or "0"
        return f"{counts.tokens_in:,} in{padded} = {self.tokens_stored:,} stored + {dropped} dropped"

    def _documents(self) -> str:
        """Return how many documents there are, and how their tokens are stored."""
        splits = Counter(shard.split for shard in self.shards) if self._is_stream else self.batches_of_split
        noun = ("shard", "shards") if self._is_stream else ("batch", "batches")
        parts = ", ".join(f"{counted(count, *noun)} {split}" for split, count in splits.items())
        return f"{self.counts.documents:,}{self.packing and f', {self.packing} packing'}: {parts}"

    def _speed(self) -> str:
        """Rate the tokens that this run made or wrote, not those that it kept."""
        rate = self.tokens_per_second
        kept = self.documents_kept
        if rate is None:
            return f"{self.seconds:.2f} s, nothing was left to write"
        checks = f" ({self.kept.seconds:.2f} s to check the kept shards)" if self.kept.seconds else ""
        again = f" (kept {kept:,} tokens of documents)" if kept else ""
        bytes_rate = format_bytes(rate * self.meta.dtype.itemsize)
        return f"{self.seconds:.2f} s{checks}{again}, {format_count(rate)}tok/s, {bytes_rate}/s"

    def _uint16_would_save(self) -> int:
        """Return the bytes by which the tokens would be smaller as uint16; 0: nothing proves that they fit."""
        fits = self.max_token is not None and self.max_token < 2**16 and self.part == WHOLE
        return self.tokens_stored * UINT16_SAVES if self.lacks_vocab_size and fits else 0

    def _smaller(self) -> str:
        """Name the option that would store the tokens in fewer bytes; "" if none would."""
        if not self._uint16_would_save() or self.max_token is None:
            return ""
        dtype = dtype_of_ids(self.max_token + 1)
        if self.dtype:  # files of another trainer have no ids of one byte unless they are asked for
            dtype = DTYPE_BY_NAME["uint16"]
        saved = self.tokens_stored * (DTYPE_BY_NAME["uint32"].itemsize - dtype.itemsize)
        before = " before compression" if self.meta.codec != NO_CODEC else ""
        return (
            f"all ids fit {dtype.name}, the largest is {self.max_token:,}: --vocab-size {self.max_token + 1} would "
            f"store them in it and save {format_bytes(saved)}{before}"
        )

    def _lost(self) -> str:
        """Count the characters that the tokenizer has no token for; "" if there are none."""
        lost = self.counts.characters_lost
        if not lost:
            return ""
        lossy = counted(self.counts.documents_lossy, "document")
        return f"the tokenizer has no token for {counted(lost, 'character')} of {lossy}, which are lost"

    def _no_shard(self) -> str:
        """Name the cause of a part that has nothing to write; "" if it has."""
        is_empty = self.part != WHOLE and not self.shards
        return "this part has no shard, since there are fewer shards than parts: pass --shards" if is_empty else ""

    def _extension(self) -> str | None:
        """Name the tools that do not read such files; None if all do."""
        notes = {FORMATS[shard.backend].uint16_note for shard in self.shards if shard.backend in FORMATS} - {""}
        is_noted = self.meta.dtype.name == "uint16" and bool(notes)
        return f"{'; '.join(sorted(notes))}; --dtype uint32 writes what all of them read" if is_noted else None


@dataclass(frozen=True)
class Done(Report):
    """The report of a conversion whose result was there already: an earlier run has counted its documents."""

    @classmethod
    def of(cls, store: Path) -> Self:
        """Return the report of a store that is the result."""
        index = ShardIndex.load(store)
        shards = list(index.shards)
        return cls(
            destination=store,
            meta=index.meta,
            shards=shards,
            counts=TokenCounts(),
            seconds=0.0,
            kept=KeptShards(len(shards), sum(shard.token_count for shard in shards)),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.destination)!r}, nothing to do)"

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {"path": str(self.destination), "done": True}

    def lines(self) -> list[tuple[str, str]]:
        """Return the report for people."""
        return [("present", f"{self.destination}, made of these files in this way: nothing to do")]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The report of a conversion that would be done: its files, and the space and time that they need.

    Attributes
    ----------
    path
        The result.
    num_batches, batch_size, seq_len
        The batches; None: of documents, whose rows are not counted before.
    num_tokens
        The tokens of documents; None: of batches.
    dtype
        The dtype of the ids in the files.
    num_shards, largest_shard_bytes, total_bytes, inodes
        The files; of documents the bytes of ids alone, about.
    uint16_would_save_bytes
        The bytes by which the tokens would be smaller as uint16, which a vocabulary size would allow; 0: none.
    left_behind
        The words for all that the source has and the files do not hold; "": they hold everything.
    field_sets
        The names and splits of the field sets that would be copied with the tokens; None: there are none.
    workers
        The processes that would write.
    memory_bytes
        Memory of all processes of a node together; None: of documents.
    shuffle
        The way in which the records would be read, and the reason; None: of documents.
    free
        The bytes and inodes that are free; None where the file system does not count inodes.
    lack
        The message of a disk that is too small; "": it has room.
    seconds
        The time of the conversion, about.
    is_estimate
        Whether the number of tokens follows from a sample of the documents.
    rows
        The shape of the rows that documents become; "": they are kept.
    temp_bytes
        The disk that takes meanwhile.
    """

    path: str
    num_batches: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    num_tokens: int | None = None
    dtype: str
    num_shards: int
    largest_shard_bytes: int
    total_bytes: int
    uint16_would_save_bytes: int | None = None
    inodes: int
    left_behind: str | None = None
    field_sets: tuple[str, ...] | None = None
    workers: int
    memory_bytes: int | None = None
    shuffle: str | None = None
    free: dict[str, int | None]
    lack: str
    seconds: float
    is_estimate: bool | None = None
    rows: str | None = None
    temp_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        return {**facts, "fits": not self.lack}

    def lines(self) -> list[tuple[str, str]]:
        """Return the report for people."""
        free_inodes = "an uncounted number" if self.free["inodes"] is None else f"{self.free['inodes']:,}"
        lines = [
            ("would write", self.path),
            *self._contents(),
            ("shards", f"{self.num_shards:,}, the largest {format_bytes(self.largest_shard_bytes)}"),
            ("disk", f"{format_bytes(self.total_bytes)} of {format_bytes(self.free['bytes'] or 0)} that are free"),
            ("temporary", format_bytes(self.temp_bytes) if self.temp_bytes or self.num_batches else ""),
            ("field sets", ", ".join(self.field_sets or ())),
            ("note", self.left_behind),
            ("shuffle", self.shuffle),
            ("files", f"{counted(self.inodes, 'inode')} of {free_inodes} that are free"),
            ("workers", self._workers()),
            ("time", _time(self.seconds)),
            ("does not fit", self.lack),
        ]
        return [(name, text) for name, text in lines if text]

    def _contents(self) -> list[tuple[str, str]]:
        """Return the lines of the batches, or of the tokens of documents."""
        if self.num_batches is None:
            about = "about " if self.is_estimate else ""
            tokens = f"{about}{self.num_tokens:,} of {self.dtype}{', by a sample' if about else ''}"
            return [("tokens", tokens), ("rows", self.rows or "")]
        saved = self.uint16_would_save_bytes or 0
        smaller = f"uint32: a --vocab-size of at most 65,536 would store uint16 and save {format_bytes(saved)}"
        shape = f"{self.batch_size:,} x {self.seq_len:,} {self.dtype}"
        return [("batches", f"{self.num_batches:,} of {shape}"), ("dtype", smaller if saved else "")]

    def _workers(self) -> str:
        if self.memory_bytes is None:
            return f"{self.workers}"
        return f"{self.workers}, at most {format_bytes(self.memory_bytes)} of memory together"


def _time(seconds: float) -> str:
    """Return the time of a conversion in words, estimated from one second of it."""
    return f"about {format_seconds(seconds)}, by a sample" if seconds >= 1 else "less than a second"
