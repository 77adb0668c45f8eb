"""The names from other projects, with their arguments, on top of this package.

ZeroBatch v2, the `.npy` DatasetLoader, the tokenized-corpus lesson and the streaming pipeline. docs/names.md lists
the differences on purpose.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.downloads import fetch_shards
from zb_hdf5.converters.arguments import convert
from zb_hdf5.converters.reports import Report
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.errors import ArgumentError, BatchIndexError, ConvertError, require_choice
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.publishing import refuse_existing, scratch_directory
from zb_hdf5.formats import native
from zb_hdf5.formats.access import Access, Verify
from zb_hdf5.formats.corpus import Batches, Corpus
from zb_hdf5.formats.stream_writer import HDF5ShardWriter as HDF5ShardWriter
from zb_hdf5.formats.windows import Windows
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.order import require_positive, resolve_rank, write_order
from zb_hdf5.loaders.state import short_repr
from zb_hdf5.loaders.text_loader import TextLoader, paths_of_split
from zb_hdf5.packages import require_package
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import StoreMeta, TokenArray, as_stored, stored_dtype
from zb_hdf5.store.format_list import FORMATS, load_format
from zb_hdf5.store.opening import open_corpus
from zb_hdf5.store.store_corpus import require_stream
from zb_hdf5.text.parquet_file import ParquetFile
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.text.tokenizers import DEFAULT_BOUNDARY, EncodingTokenizer, load_tokenizer
from zb_hdf5.text.tokenizers import Tokenizer as TextTokenizer

if TYPE_CHECKING:
    import tiktoken
    import torch

    from zb_hdf5.loaders.loader_options import TextSplit, WantedShuffle

Special = int | str | None
BASE_URL: Final = "https://huggingface.co/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main"


# --- ZeroBatch v2 ----------------------------------------------------------------------------------------------


class BatchFileReader(Batches):
    """A reader of a `.batch` file. Threads and processes as for `Batches`.

    Parameters
    ----------
    path, access, verify
        As for `open_corpus`.
    """

    def __init__(self, path: str | os.PathLike[str], *, access: str = "auto", verify: str = "auto") -> None:
        corpus = native.BatchCorpus(path, access=access).with_verify(verify)
        super().__init__(corpus, cast(Windows, corpus.windows))

    version: Final = 1
    padded_batch_bytes = property(lambda self: self.meta.padded_batch_bytes)
    seed = property(lambda self: self.meta.seed)
    total_records = property(lambda self: self.meta.total_records)

    @property
    def mm(self) -> npt.NDArray[np.uint8]:
        """All bytes of the file, mapped."""
        return np.memmap(self.path, np.uint8, "r")


class BatchNativeLoader(Loader["torch.Tensor"]):
    """A `Loader` of one rank in the block order.

    Parameters
    ----------
    path
        Anything that `open_reader` takes.
    block_size
        Batches of a block; the blocks are shuffled.
    shuffle
        False: batches come as stored.
    seed
        As for `Loader`.
    epoch
        The epoch that it begins with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block_size: int = 256,
        shuffle: bool = True,
        seed: int = 42,
        epoch: int = 0,
    ) -> None:
        order: WantedShuffle = ("block", block_size) if shuffle else "sequential"
        super().__init__(path, shuffle=order, seed=seed, rank=0, world_size=1)
        self.path = path
        self.set_epoch(epoch)


def write_batch_file(
    output_path: str | os.PathLike[str],
    tokens_array: npt.ArrayLike,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    dtype: str = "uint32",
    overwrite: bool = False,
) -> int:
    """Shuffle records, group them into batches, and write a `.batch` file.

    Parameters
    ----------
    output_path
        The file to write.
    tokens_array
        Shape (num_records, seq_len), any integer dtype; a memory map is never loaded whole.
    batch_size, seq_len
        Shape of a batch. The last `num_records % batch_size` shuffled records are dropped.
    seed
        Seed of the shuffle.
    dtype
        "uint32" or "uint16". The second is an extension: other readers of `.batch` files take it for uint32.
    overwrite
        Replace an existing file.

    Returns
    -------
    int
        The number of batches.

    Raises
    ------
    ConvertError
        If the array has another shape, an id that does not fit, or fewer records than one batch.
    ExistsError
        If the file exists.
    """
    tokens = np.asanyarray(tokens_array)
    if tokens.ndim != 2 or tokens.shape[1] != seq_len:
        raise ConvertError(f"tokens_array: expected shape (num_records, {seq_len}), found {tokens.shape}")
    meta, num_batches = _plan(output_path, len(tokens), batch_size, seq_len, seed, dtype)
    order = write_order(len(tokens), seed)
    group = max(1, GROUP_BYTES // meta.batch_bytes)
    with native.BatchFileWriter(output_path, meta, expected_batches=num_batches, overwrite=overwrite) as writer:
        for start in range(0, num_batches, group):
            records = order.indices(np.arange(start * batch_size, min(start + group, num_batches) * batch_size))
            writer.write(tokens[records].reshape(-1, batch_size, seq_len))
    return num_batches


def write_batch_dataset(
    output_path: str | os.PathLike[str],
    tokens_iter: Iterable[npt.ArrayLike],
    total_records: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    dtype: str = "uint32",
    overwrite: bool = False,
    memory_bytes: int = 1 << 30,
) -> int:
    """Write the file of `write_batch_file`, byte for byte, from an iterator of records.

    The records pass through a file in `<output_path>.records.partial/`, which is converted in sequence: neither the
    memory nor a slow disk limits how many there are.

    Parameters
    ----------
    output_path, batch_size, seq_len, seed, dtype, overwrite
        As for `write_batch_file`.
    tokens_iter
        Records, each an array of shape (seq_len,).
    total_records
        The number of records that come.
    memory_bytes
        Memory of the conversion, at least 100 MiB.

    Returns
    -------
    int
        The number of batches.

    Raises
    ------
    ConvertError
        If a record has another shape or an id that does not fit, or if more or fewer records come.
    ExistsError
        If the file exists.
    """
    meta, num_batches = _plan(output_path, total_records, batch_size, seq_len, seed, dtype)
    output = Path(output_path)
    if not overwrite:
        refuse_existing(output)
    with scratch_directory(output.with_name(output.name + ".records")) as folder:
        source = folder / "records.npy"
        rows = np.lib.format.open_memmap(source, "w+", meta.dtype, (total_records, seq_len))
        for number, values in zip_longest(range(total_records), tokens_iter):
            if number is None or values is None:
                found = "more" if number is None else f"{number:,}"
                raise ConvertError(f"tokens_iter: expected {total_records:,} records, found {found}")
            record = np.asarray(values)
            name = f"record {number:,}"
            if record.shape != (seq_len,):
                raise ConvertError(f"{name}: expected shape ({seq_len},), found {record.shape}")
            rows[number] = as_stored(record, meta, name)
        del rows
        convert(
            source,
            "batch",
            output,
            batch_size=batch_size,
            seq_len=seq_len,
            seed=seed,
            dtype=meta.dtype.name,  # type: ignore[arg-type]  # one of the words, which the plan has checked
            workers=1,
            memory=memory_bytes,
            force=overwrite,
        )
    return num_batches


def _plan(
    path: object,
    total_records: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    dtype: str,
) -> tuple[StoreMeta, int]:
    """Return the shape and the number of batches of a file; `ConvertError` if a `.batch` header cannot have them."""
    meta = StoreMeta(batch_size, seq_len, stored_dtype(dtype), seed, total_records)
    num_batches = total_records // batch_size
    if num_batches == 0:
        raise ConvertError(f"{path}: {total_records:,} records do not fill one batch of {batch_size:,}")
    load_format(FORMATS["batch"]).require(meta, Path(str(path)))
    native.pack_header(meta, num_batches)
    return meta, num_batches


# --- a folder of .npy files ------------------------------------------------------------------------------------


class DatasetLoader(Loader["tuple[torch.Tensor, torch.Tensor]"]):
    """Gives `(x, y)` for ever: consecutive tokens of a folder's `.npy` files, and the same shifted by one.

    x and y are torch.int64 of shape (batch, seq_len). Row r + 1 of x continues row r, the ranks take turns batch by
    batch, and every rank goes from one file to the next, by name, at the same step. Only tokens at the very end that do
    not fill a step of all ranks are left out of an epoch; fewer than one step are an `ArgumentError`.

    Parameters
    ----------
    batch, seq_len
        Rows of a batch, and tokens of a row.
    process_rank, num_processes
        The rank of this process, and the number of ranks.
    dataset_dir
        A folder of 1-D `.npy` files.
    device
        The device of the batches.

    Attributes
    ----------
    filepaths
        The files, in order.
    file_idx, tok_idx
        The next batch of this process begins at token `tok_idx` of the file `filepaths[file_idx]`.
    file_data
        That file, mapped.
    """

    def __init__(
        self,
        batch: int,
        seq_len: int,
        process_rank: int,
        num_processes: int,
        dataset_dir: str | os.PathLike[str],
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(
            dataset_dir,
            backend="npy",
            batch_size=batch,
            seq_len=seq_len,
            shuffle="sequential",
            targets=True,
            rank=process_rank,
            world_size=num_processes,
            device=device,
        )
        self.batch = batch
        self.process_rank = process_rank
        self.num_processes = num_processes
        self.device = device
        self.filepaths = [str(file.path) for file in self.batches.corpus.files]
        self._starts = self.batches.tokens.files.starts

    seq_len = property(lambda self: self.batches.stride)
    file_idx = property(lambda self: self._next_token()[0])
    tok_idx = property(lambda self: self._next_token()[1])
    file_data = property(lambda self: np.load(self.filepaths[self.file_idx], mmap_mode="r"))

    def _next_token(self) -> tuple[int, int]:
        """Return the file, and the offset in it, at which the next batch begins."""
        is_within = self.plan.steps_from(self._position) > 0
        position = self._position if is_within else 0  # of the next epoch
        token = (position + self.rank * self.batch_size) * self.seq_len
        number = bisect_right(self._starts, token) - 1
        return number, token - self._starts[number]


# --- the tokenized corpus --------------------------------------------------------------------------------------


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


# --- the streaming pipeline ------------------------------------------------------------------------------------


def get_tokenizer() -> RustBPETokenizer:
    """Return the tokenizer of `tokenizer/tokenizer.json` in the base folder."""
    return RustBPETokenizer(f"hf:{_base() / 'tokenizer' / 'tokenizer.json'}")


def get_dist_info() -> tuple[bool, int, int, int]:
    """Return (whether there are several ranks, rank, rank on this node, ranks)."""
    rank, world_size = resolve_rank()
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return world_size > 1, rank, int(local), world_size


def download_single_file(index: int) -> bool:
    """Download file number `index` of the corpus into `base_data`, unless it is there. Return whether it is."""
    [report] = fetch_shards(f"{BASE_URL}/shard_{{:05d}}.parquet", 1, _data(), first=index)
    return report.problem is None


def list_parquet_files(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the `.parquet` files of a folder, by default of `base_data`, in the order of their names."""
    folder = _data(data_dir)
    return [str(folder / name) for name in sorted(os.listdir(folder)) if name.endswith(".parquet")]


def parquets_iter_batched(
    split: str,
    start: int = 0,
    step: int = 1,
    *,
    data_dir: str | os.PathLike[str] | None = None,
) -> Iterator[list[str]]:
    """Yield the texts of row groups `start`, `start + step`, ... of the last file ("val"), or of each other one."""
    for path in paths_of_split(_data(data_dir), split):
        file = ParquetFile(path, "text")
        for number in range(start, file.num_row_groups, step):
            yield [text for block in file.row_group(number) for text in block.texts]


class TokenizingLoader(TextLoader["tuple[torch.Tensor, torch.Tensor]"]):
    """An endless loader of `(inputs, targets)`, int32 and int64, of shape (B, T); its ranks deal the row groups.

    Parameters
    ----------
    B, T
        Rows of a batch, and tokens of a row.
    split
        "train": all files but the last one. "val": that one.
    tokenizer_threads
        Threads that tokenize.
    tokenizer_batch_size
        Has no effect on the batches.
    data_dir
        The folder of the `.parquet` files; None: `base_data`.
    tokenizer
        As for `load_tokenizer`; None: that of `get_tokenizer`.
    bos_token
        The special token in front of each document.
    device
        None: the CUDA device if there is one.
    """

    def __init__(
        self,
        B: int,  # the names that its users write
        T: int,
        split: TextSplit,
        tokenizer_threads: int = 4,
        tokenizer_batch_size: int = 128,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        tokenizer: str | TextTokenizer | None = None,
        bos_token: str = DEFAULT_BOUNDARY,
        device: str | torch.device | None = None,
    ) -> None:
        library = require_package("torch", "torch")
        require_positive(tokenizer_batch_size=tokenizer_batch_size)
        if device is None and library.cuda.is_available():
            device = "cuda"
        super().__init__(
            _data(data_dir),
            tokenizer=tokenizer or get_tokenizer().spec,
            batch_size=B,
            seq_len=T,
            split=split,
            targets=True,
            boundary_token=bos_token,
            num_threads=tokenizer_threads,
            device=device,
        )

    def _row_groups(self, files: list[ParquetFile], rank: int) -> dict[int, tuple[ParquetFile, int]]:
        groups = enumerate((file, number) for file in files for number in range(file.num_row_groups))
        return {place: group for place, group in groups if group[1] % self.world_size == rank}

    def _read_from(self, position: Any) -> Generator[tuple[Any, Any]]:
        return (((inputs.int(), targets), place) for (inputs, targets), place in super()._read_from(position))


tokenizing_distributed_data_loader = TokenizingLoader


def _base() -> Path:
    """Return the folder of `base_data/` and `tokenizer/`."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat").expanduser()


def _data(folder: str | os.PathLike[str] | None = None) -> Path:
    return _base() / "base_data" if folder is None else Path(folder)
