"""What is tokenized, how, and into which files: the part that batch stores and streams of text share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zb_hdf5.converters.journal import is_result
from zb_hdf5.converters.routing import DocumentCounts, Encoded, Recipe, ShardPlan, encode_shard
from zb_hdf5.converters.run import WorkOptions
from zb_hdf5.converters.shard import file_states
from zb_hdf5.converters.task import Progress, tokens_written
from zb_hdf5.converters.token_files import FinishedTokens, write_token_files
from zb_hdf5.files.publishing import LockedFolder
from zb_hdf5.spec import INDEX_NAME, NO_CODEC, stored_dtype
from zb_hdf5.text.corpus import DocumentFile
from zb_hdf5.text.tokenizers import load_tokenizer, token_dtype


@dataclass(frozen=True)
class TokenizeTask:
    """The documents of one file of tokens, for any process. Picklable.

    Attributes
    ----------
    paths
        The file of tokens, and what else is written with it.
    codec
        With its level, of a file that is written to stay.
    """

    paths: tuple[Path, ...]
    shard: ShardPlan
    recipe: Recipe
    dtype: np.dtype[Any]
    vocab_size: int
    tokenizer: str
    num_threads: int
    codec: str = NO_CODEC

    def tokens_done(self) -> int:
        """Return how far another process is, by the size of its file."""
        return tokens_written(self.paths[0], self.dtype)

    def encode(self, counts: DocumentCounts, progress: Progress) -> Iterator[Encoded]:
        """Yield its documents, tokenized block by block, and count them."""
        for encoded in encode_shard(self.shard, self.recipe, self.num_threads, counts):
            yield encoded
            progress(len(encoded.tokens))


class TokenizedText(NamedTuple):
    """All files of tokens of a conversion, and what became of all documents.

    Attributes
    ----------
    files_kept, tokens_kept
        How many files an earlier run had finished, and how many tokens of text were thus not tokenized again.
    """

    files: list[tuple[TokenizeTask, FinishedTokens]]
    counts: DocumentCounts
    files_kept: int
    tokens_kept: int


class TextPlan:
    """Files of documents, what becomes of their texts, and which of them go to which file of tokens.

    Parameters
    ----------
    files, kind
        The documents, and what `shards.json` calls their format.
    shards
        The documents of each file of tokens.
    options
        JSON of what else decides the store that is made of the tokens.
    """

    def __init__(
        self,
        files: Sequence[DocumentFile],
        kind: str,
        recipe: Recipe,
        shards: Sequence[ShardPlan],
        options: dict[str, Any] | None = None,
    ) -> None:
        self.files, self.recipe, self.shards = files, recipe, shards
        self._options = options or {}
        self._files = {
            "format": kind,
            "files": [str(file.path) for file in files],
            "boundary_token_id": recipe.boundary_token_id,
            "max_document_tokens": recipe.max_document_tokens,
        }
        tokenizer = load_tokenizer(recipe.tokenizer)
        self.vocab_size, self.dtype = tokenizer.vocab_size, stored_dtype(token_dtype(tokenizer))
        self._tokenizer = dict(tokenizer.description)
        self.tokenizer = json.dumps(self._tokenizer)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides the tokens of every file, as JSON has it."""
        routes = [
            [
                shard.split,
                shard.holdout and asdict(shard.holdout),
                [(group.file_number, group.number) for group in shard.groups],
            ]
            for shard in self.shards
        ]
        return {
            "source": self._files,
            "text_column": self.files[0].column,
            "more_columns": [self.files[0].id_column, *self.files[0].metadata_columns],
            "tokenizer": self._tokenizer,
            "files": file_states([file.path for file in self.files]),
            "routing": hashlib.sha256(json.dumps(routes).encode()).hexdigest(),
        }

    @cached_property
    def digest(self) -> str:
        """Over all that decides the store, but for the time when its sources were changed last."""
        sizes = {path: size for path, (size, _) in self.identity["files"].items()}
        return hashlib.sha256(json.dumps([{**self.identity, "files": sizes}, self._options]).encode()).hexdigest()

    def source(self, **more: Any) -> dict[str, Any]:
        """Return what `shards.json` says of the source."""
        return {**self._files, **more, "work": self.digest}

    def is_result(self, store: Path) -> bool:
        """Return whether a store was made of these files as they are now, and in the same way."""
        try:
            same = json.loads((store / INDEX_NAME).read_bytes())["source"]["work"] == self.digest
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return is_result(store, same, (file.path for file in self.files))

    def tokenize(
        self,
        write: Callable[[TokenizeTask, Progress], FinishedTokens],
        paths: Callable[[int], tuple[Path, ...]],
        folder: LockedFolder,
        work: WorkOptions,
        *,
        codec: str = NO_CODEC,
    ) -> TokenizedText:
        """Write each file of tokens into a folder, and keep a journal of them there.

        Parameters
        ----------
        write
            Writes the files of a task.
        paths
            Returns where they are, by the number of the shard.
        codec
            Of files that are written to stay.

        Raises
        ------
        ConvertError
            If there are no documents, or an interrupted run has left something that is not to be gone on with.
        """
        tasks = {
            number: TokenizeTask(
                paths(number),
                shard,
                self.recipe,
                self.dtype,
                self.vocab_size,
                self.tokenizer,
                work.num_threads,
                codec,
            )
            for number, shard in enumerate(self.shards)
        }
        plan = {**self.identity, "codec": codec}
        written = write_token_files(tasks, write, plan, folder, work, [file.path for file in self.files])
        files = list(zip(tasks.values(), written.finished, strict=True))
        tokens_kept = sum(done.counts.tokens.tokens_in for done in written.kept)
        return TokenizedText(files, written.counts, len(written.kept), tokens_kept)
