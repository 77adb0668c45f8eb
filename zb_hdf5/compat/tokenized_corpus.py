"""A tokenized corpus as a lesson builds it: a tokenizer, shards of token streams, and windows over them."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.arguments import convert
from zb_hdf5.converters.reports import Report
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.errors import ArgumentError, BatchIndexError, require_choice, require_positive
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.publishing import refuse_existing, scratch_directory
from zb_hdf5.formats.access import Access, Verify
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.state import short_repr
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.opening import open_corpus
from zb_hdf5.store.store_corpus import require_stream
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.text.tokenizers import DEFAULT_BOUNDARY, EncodingTokenizer, load_tokenizer
from zb_hdf5.text.tokenizers import Tokenizer as TextTokenizer

if TYPE_CHECKING:
    import tiktoken


Special = int | str | None


class RustBPETokenizer:
    """A tokenizer with lists of ids.

    Parameters
    ----------
    enc
        A `tiktoken.Encoding`, or a name for `load_tokenizer`.
    bos_token
        The special token that begins each document.
    """

    def __init__(self, enc: str | tiktoken.Encoding = "byte", bos_token: str = DEFAULT_BOUNDARY) -> None:
        self._core: TextTokenizer = load_tokenizer(enc) if isinstance(enc, str) else EncodingTokenizer(enc)
        self.enc = enc
        self.spec = self._core.spec
        self.vocab_size = self._core.vocab_size
        self._bos_token = bos_token

    def encode_special(self, text: str) -> int:
        """Return the id of a special token; raise `ArgumentError` if there is none."""
        return self._core.special_token_id(text)

    @property
    def bos_token_id(self) -> int:
        """The id of `bos_token`."""
        return self.get_bos_token_id()

    def get_bos_token_id(self) -> int:
        """Return the id of `bos_token`."""
        return self.encode_special(self._bos_token)

    def encode(
        self,
        text: str | Sequence[str],
        prepend: Special = None,
        append: Special = None,
        num_threads: int = 8,
    ) -> list[Any]:
        """Return the ids of a text, or a list of them for each text of a list.

        Parameters
        ----------
        text
            Special tokens that are spelt out in it are ordinary text.
        prepend, append
            An id or a special token at the beginning and the end of each text; None: nothing.
        num_threads
            Threads for a list of texts.
        """
        if isinstance(text, str):
            return self.encode([text], prepend, append, num_threads)[0]  # type: ignore[no-any-return]
        first = self._end(prepend)
        last = self._end(append)
        ids, lengths = self._core.encode(text, num_threads)
        if not len(lengths):
            return []
        return [[*first, *row.tolist(), *last] for row in np.split(ids, np.cumsum(lengths)[:-1])]

    def _end(self, token: Special) -> list[int]:
        if token is None:
            return []
        return [self.encode_special(token) if isinstance(token, str) else token]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of ids."""
        return self._core.decode(ids)


#: The name in the lesson.
Tokenizer = RustBPETokenizer


class MmapTokenStore:
    """A token stream: its tokens by their positions, and its documents.

    Parameters
    ----------
    path, split, access, verify, read_as
        As for `open_corpus`.

    Attributes
    ----------
    corpus
        The corpus, which has all else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = AUTO_SPLIT,
        access: Access = "auto",
        verify: Verify = "auto",
        read_as: ReadAs = AS_STORED,
    ) -> None:
        corpus = open_corpus(path, split=split, access=access, verify=verify, read_as=read_as)
        self.corpus = require_stream(corpus)

    paths = property(lambda self: [file.path for file in self.corpus.files])
    num_tokens = property(lambda self: self.corpus.num_tokens)
    dtype = property(lambda self: self.corpus.dtype)
    document_count = property(lambda self: self.corpus.document_count)
    doc_offsets = property(lambda self: self.corpus.doc_offsets)

    def get_slice(self, start: int, stop: int) -> TokenArray:
        """Return tokens `start` to `stop`: 1-D, read-only where it is a view of a mapping.

        Raises
        ------
        BatchIndexError
            Unless `0 <= start <= stop <= num_tokens`.
        """
        if not 0 <= start <= stop <= self.corpus.num_tokens:
            raise BatchIndexError(
                f"{self.corpus.path}: no tokens {start:,} to {stop:,}: it has {self.corpus.num_tokens:,}"
            )
        return self.corpus.tokens[start:stop]

    def document(self, number: int) -> TokenArray:
        """Return the tokens of one document, its boundary token included."""
        offsets = self.corpus.doc_offsets
        if not 0 <= number < len(offsets) - 1:
            raise BatchIndexError(f"{self.corpus.path}: no document {number:,}: it has {len(offsets) - 1:,}")
        start, stop = offsets[number : number + 2].tolist()
        return self.corpus.tokens[start:stop]

    def __len__(self) -> int:
        return self.corpus.num_tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.corpus.path)!r}, {len(self.corpus):,} tokens)"

    def refresh(self) -> int:
        """See the tokens that were committed since; return `num_tokens`."""
        return self.corpus.refresh()

    def close(self) -> None:
        """Close the corpus."""
        self.corpus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ShardedTokenizationPipeline:
    """Tokenizes documents into a store of token streams: shards, and the `shards.json` that names them.

    Parameters
    ----------
    documents
        Texts; `convert(files, "stream")` takes files of documents.
    tokenizer
        A `Tokenizer` of this module, or a name for `load_tokenizer`.
    num_shards
        Text number k goes to shard k % num_shards.
    boundary_token
        The special token after each document; None: the one of the tokenizer.
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: str | Tokenizer = "byte",
        *,
        num_shards: int = 1,
        boundary_token: str | None = None,
    ) -> None:
        if isinstance(documents, str):
            raise ArgumentError("documents: expected an iterable of texts, found one text; pass [text]")
        require_positive(num_shards=num_shards)
        spec = tokenizer.spec if isinstance(tokenizer, Tokenizer) else tokenizer
        known = load_tokenizer(spec)
        boundary = known.boundary_token_id if boundary_token is None else known.special_token_id(boundary_token)
        self._documents = documents
        self._num_shards = num_shards
        self._recipe = Recipe(spec, boundary)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tokenizer={self._recipe.tokenizer!r}, num_shards={self._num_shards})"

    def run(self, destination: str | os.PathLike[str], *, workers: int = 1, overwrite: bool = False) -> Report:
        """Write the store; meanwhile, texts are in `<destination>.texts.partial/`.

        Parameters
        ----------
        destination
            The folder of the store.
        workers
            Processes that tokenize.
        overwrite
            Replace an existing store at the end.

        Raises
        ------
        ExistsError
            If the destination exists.
        ConvertError
            If there are fewer documents than shards.
        """
        destination = Path(destination)
        if not overwrite:
            refuse_existing(destination)
        with scratch_directory(destination.with_name(destination.name + ".texts")) as folder:
            paths = [folder / f"texts-{number:05}.jsonl" for number in range(self._num_shards)]
            with ExitStack() as stack:
                files = [stack.enter_context(path.open("w", encoding="utf-8")) for path in paths]
                for number, text in enumerate(self._documents):
                    if not isinstance(text, str):
                        raise ArgumentError(f"document {number:,}: expected a text, found {short_repr(text)}")
                    files[number % len(files)].write(json.dumps({"text": text}) + "\n")
            source = TextSource(open_documents(paths, "jsonl"), "texts", self._recipe)
            report = convert(
                source,
                "stream",
                destination,
                shards=self._num_shards,
                workers=workers,
                force=overwrite,
            )
        return cast(Report, report)  # only a rank of an MPI job has none


class SlidingWindowDataloader(Loader[Any]):
    """Yields `(input_ids, target_ids)`: windows of a stream, and the same shifted by one, as NumPy arrays.

    Arrays are int64 of shape (batch_size, window_size). For ranks, tensors and reading ahead, pass the stream to
    `Loader` with `targets=True`.

    Parameters
    ----------
    store
        A `MmapTokenStore`, or a corpus that is a token stream.
    window_size, batch_size
        Tokens of a window, which reads one more, and windows of a batch.
    order
        "epoch": each window that begins at a multiple of `window_size` comes once, in a uniform order; only windows at
        the end that do not fill a batch are left out. "random": windows begin anywhere, each start once.
    seed, epoch
        They choose the order.
    """

    def __init__(
        self,
        store: MmapTokenStore | Corpus,
        window_size: int,
        batch_size: int,
        *,
        order: str = "epoch",
        seed: int = 42,
        epoch: int = 0,
    ) -> None:
        require_choice("order", order, ("epoch", "random"))
        require_positive(window_size=window_size)
        self.store = store
        self.window_size = window_size
        self.order = order
        stride = 1 if order == "random" else window_size
        corpus = store.corpus if isinstance(store, MmapTokenStore) else store
        super().__init__(
            corpus.batches(1, window_size + 1, stride),
            batch_size=batch_size,
            shuffle="records",
            seed=seed,
            rank=0,
            world_size=1,
        )
        self.set_epoch(epoch)

    def _read_from(self, position: int) -> Generator[tuple[Any, int]]:
        for tokens, after in super()._read_from(position):
            rows = tokens.numpy()
            yield (rows[:, :-1], rows[:, 1:]), after
