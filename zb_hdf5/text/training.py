"""Training a tokenizer: byte-level BPE by the Hugging Face library, written so that tiktoken encodes the same."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, ConvertError
from zb_hdf5.files.named_splits import AUTO_SPLIT, SplitFiles
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import disk_errors, published_together, write_fully
from zb_hdf5.packages import require_package
from zb_hdf5.signals import run_in_thread
from zb_hdf5.text.byte_pairs import token_bytes
from zb_hdf5.text.document_file import DocumentFile
from zb_hdf5.text.dropped import DEFAULT_MAX_DROPPED, Dropped
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.text.tokenizers import DEFAULT_BOUNDARY, as_unicode, load_tokenizer

#: How text is cut into pieces that are never merged across: GPT-4's way, with numbers of 1 or 2 digits, not 3.
SPLIT_PATTERN: Final = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
#: One document of so many is kept from the training: the tokenizer is measured on text that it has not seen.
HELD_OUT: Final = 20
#: Characters, after which a run of spaces or of anything else is cut before it is trained on.
LONGEST_WORD: Final = 1 << 12
LONG_WORD: Final = re.compile(rf"\s{{{LONGEST_WORD + 1},}}|\S{{{LONGEST_WORD + 1},}}")
SMALLEST_VOCABULARY: Final = 257  # the byte values and the boundary token


@dataclass(frozen=True)
class TrainingReport:
    """The trained tokenizer, its training text, and its results on the documents that were held out."""

    path: Path
    ranks_path: Path
    vocab_size: int
    digest: str
    documents: int
    dropped: Dropped
    held_out_documents: int
    held_out_bytes: int
    held_out_tokens: int

    @property
    def bytes_per_token(self) -> float:
        return self.held_out_bytes / self.held_out_tokens if self.held_out_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        paths = {"path": str(self.path), "ranks_path": str(self.ranks_path)}
        return {**asdict(self), **paths, "bytes_per_token": round(self.bytes_per_token, 4)}


def train_tokenizer(
    documents: str | os.PathLike[str] | Sequence[DocumentFile | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    vocab_size: int,
    *,
    max_dropped: float = DEFAULT_MAX_DROPPED,
    overwrite: bool = False,
    split: str | None = AUTO_SPLIT,
    max_line: int | str | None = None,
    progress: Callable[[int], None] = lambda amount: None,
    show_bars: bool = False,
) -> TrainingReport:
    """Train on all documents but the first, the 21st, and so on, and write `x.json` and, for tiktoken, `x.tiktoken`.

    Parameters
    ----------
    documents
        A path or several, of files or folders as for `open_documents`; or the files that it has opened.
    path
        The `tokenizer.json` to write, with a name that ends in ".json".
    vocab_size
        The tokens, with the boundary token, which has the last id. There are fewer if there is not enough text.
    max_dropped
        The share of the lines, rows or files that may be dropped.
    split
        The split of the paths to train on, as the names of their files tell; None for all. Open files are all read.
    max_line
        The size of the longest line of the paths, or of a text file, such as "1GiB"; None: `ZB_MAX_LINE`, or 256 MiB.
        Open files have theirs.
    progress
        Called with the characters of text that were read since the last call; all text is read twice.
    show_bars
        Let the tokenizers library draw its bars while it counts and merges, if stderr is a terminal.

    Raises
    ------
    ArgumentError
        If a name or size is impossible, or the names of files tell no split for sure.
    ConvertError
        If a file exists, there are fewer than two documents, or too many lines, rows or files are none.
    UnavailableError
        If the tokenizers library, or tiktoken, is not installed.
    """
    given = [documents] if isinstance(documents, str | os.PathLike) else [*documents]
    paths = [each for each in given if isinstance(each, str | os.PathLike)]
    files = [each for each in given if isinstance(each, DocumentFile)]
    if paths:
        files += files_of_split(open_documents(paths, max_line=max_line), paths, split)
    path = local_path(path)
    if path.suffix != ".json":
        raise ArgumentError(f"{path}: expected a name that ends in .json; the ranks for tiktoken go next to it")
    if vocab_size < SMALLEST_VOCABULARY:
        raise ArgumentError(f"vocab_size must be at least {SMALLEST_VOCABULARY}, found {vocab_size}")
    ranks_path = path.with_suffix(".tiktoken")
    require_package("tiktoken", "text")  # the check at the end needs it
    number = count()
    dropped = Dropped()
    texts = _training_texts(files, number, dropped, max_dropped, progress)
    with published_together(path, [ranks_path], overwrite=overwrite) as (file, ranks):
        trained = _train(texts, vocab_size, show_bars)
        if (num_documents := next(number)) < 2:
            raise ConvertError(f"expected at least 2 documents to train on, found {num_documents}")
        with disk_errors(path):
            write_fully(ranks.fd, _ranks(json.loads(trained.to_str())["model"]["vocab"]), 0)
            write_fully(file.fd, trained.to_str(pretty=True).encode(), 0)
    return _examine(files, path, ranks_path, num_documents, dropped, progress)


def files_of_split(
    files: Sequence[DocumentFile], paths: Sequence[str | os.PathLike[str]], split: str | None
) -> list[DocumentFile]:
    """Return the files of a split at some paths, as their names tell.

    Parameters
    ----------
    files
        The files that the paths stand for.
    paths
        Files and folders.
    split
        The split; None for all files; "auto" for those for training. The others are noted.
    """
    chosen = {*SplitFiles.at([*map(local_path, paths)], [file.path for file in files], split).files}
    return [file for file in files if file.path in chosen]


def _train(texts: Iterator[str], vocab_size: int, show_bars: bool) -> Any:
    library = require_package("tokenizers", "text")
    tokenizer = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = library.pre_tokenizers.Split(library.Regex(SPLIT_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet(), special_tokens=[], show_progress=show_bars
    )
    stopped = threading.Event()

    def until_stopped() -> Iterator[str]:
        for text in texts:
            if stopped.is_set():
                raise CancelledError
            yield text

    run_in_thread(lambda: tokenizer.train_from_iterator(until_stopped(), trainer), stopped.set)
    tokenizer.add_special_tokens([DEFAULT_BOUNDARY])
    return tokenizer


def _training_texts(
    files: Sequence[DocumentFile],
    documents: Iterator[int],
    dropped: Dropped,
    max_dropped: float,
    progress: Callable[[int], None],
) -> Iterator[str]:
    """Yield the texts that are not held out; count all documents, and note the dropped ones, if they are few."""
    seen = 0
    for block in chain.from_iterable(file.blocks() for file in files):
        dropped.merge(block.dropped)
        seen += len(block.texts)
        progress(sum(map(len, block.texts)))
        for text in block.texts:
            if next(documents) % HELD_OUT:
                yield from _in_parts(as_unicode(text))
    if seen:
        dropped.require_few(seen, max_dropped, files[0].path)


def _in_parts(text: str) -> Iterator[str]:
    """Yield a text in parts, which are cut in long words: the library takes the square of their length."""
    start = 0
    for word in LONG_WORD.finditer(text):
        for end in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def _examine(
    files: Sequence[DocumentFile],
    path: Path,
    ranks_path: Path,
    num_documents: int,
    dropped: Dropped,
    progress: Callable[[int], None],
) -> TrainingReport:
    """Encode the documents that were held out in both ways, which must agree."""
    trained = load_tokenizer(f"hf:{path}")
    fast = load_tokenizer(f"tiktoken:{ranks_path}")
    number = count()
    held_out = num_bytes = num_tokens = 0
    for block in chain.from_iterable(file.blocks() for file in files):
        texts = [text for text in block.texts if next(number) % HELD_OUT == 0]
        tokens, _ = fast.encode(texts)
        if trained.encode(texts)[0].tolist() != tokens.tolist():
            raise ConvertError(
                f"internal error: {ranks_path} encodes some text otherwise than {path.name}; use hf:{path}"
            )
        held_out += len(texts)
        num_bytes += sum(len(text.encode("utf-8", "replace")) for text in texts)
        num_tokens += len(tokens)
        progress(sum(map(len, block.texts)))
    return TrainingReport(
        path=path,
        ranks_path=ranks_path,
        vocab_size=trained.vocab_size,
        digest=trained.digest,
        documents=num_documents,
        dropped=dropped,
        held_out_documents=held_out,
        held_out_bytes=num_bytes,
        held_out_tokens=num_tokens,
    )


def _ranks(vocabulary: dict[str, int]) -> bytes:
    """Return tiktoken's file of ranks: each token's bytes in base64, and its id, which is the order of the merges."""
    in_order = sorted(vocabulary, key=lambda token: vocabulary[token])
    return b"".join(base64.b64encode(token_bytes(token)) + b" %d\n" % rank for rank, token in enumerate(in_order))
