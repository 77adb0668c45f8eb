"""The arguments of `convert`: a conversion for programs, each option by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never

from zb_hdf5.converters.batch_source import BatchSource
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.engines import Engine
from zb_hdf5.converters.reports import Report
from zb_hdf5.converters.run import run
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.document_source import DocumentSource


def convert(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Corpus | BatchSource | DocumentSource,
    target: str,
    destination: str | os.PathLike[str],
    *,
    source_format: str = "auto",
    # the sources, and how they are read
    tokenizer: str | None = None,
    text_column: str | None = None,
    ids_column: str | None = None,
    field_columns: tuple[str, ...] | None = None,
    rows: Literal["documents", "records"] | None = None,
    id_column: str | None = None,
    metadata_columns: tuple[str, ...] | None = None,
    boundary_token: str | None = None,
    no_boundary: bool | None = None,
    boundary_token_id: int | None = None,
    boundary: Literal["after", "before"] | None = None,
    max_document_tokens: int | None = None,
    max_dropped: float | None = None,
    max_line: int | str | None = None,
    source_dtype: str | None = None,
    skip_bytes: int | None = None,
    vocab_size: int | None = None,
    dataset: str | None = None,
    offsets: str | None = None,
    axes: Literal["batch,record,token", "record,token"] | None = None,
    channel: int | None = None,
    field_channels: Mapping[str, int] | None = None,
    unwritten: Literal["fill", "drop"] | None = None,
    split: str | None = None,
    # records, batches and splits
    layout: Literal["batches", "stream"] | None = None,
    packing: Literal["concat", "best-fit", "pad"] | None = None,
    like: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    remainder: Literal["drop", "pad", "error"] | None = None,
    pad_id: int | None = None,
    val_fraction: float | None = None,
    val_last_shard: bool | None = None,
    # the files that are written
    dtype: Literal["auto", "keep", "uint32", "uint16", "uint8"] | None = None,
    codec: str | None = None,
    live: bool | None = None,
    tokens_only: bool | None = None,
    note: str | None = None,
    field_set: tuple[str, ...] | None = None,
    shards: int | None = None,
    shard_size: int | str | None = None,
    shard_per_source: bool | None = None,
    # who does it, and how it is reported
    memory: int | str | None = None,
    shuffle_method: Literal["auto", "direct", "two-pass"] | None = None,
    workers: int | None = None,
    threads: int | None = None,
    executor: Literal["local", "mpi"] | None = None,
    shard_range: tuple[int, int] | None = None,
    resume: bool | None = None,
    force: bool | None = None,
    drop_field_set: tuple[str, ...] | None = None,
    progress: Callable[[int], None] | None = None,
    engine: Engine | None = None,
    **unknown: Never,
) -> Report | None:
    """Convert tokens or documents to another format, as `zb convert` does.

    The options are the options of the command, by the same names. An option that is None has the default of its kind of
    source, which `zb convert --from FORMAT --to FORMAT --help` names; one that the source has no use for is refused.
    They stand in the groups of that help: the sources, the layout, the files that are written, and the work.

    Parameters
    ----------
    source
        One path or several, of files, folders or stores, or the URL of a store. Or a corpus of `open_corpus`, which
        stays open: its path is read as it was opened, with the same backend, `access`, `read_as` and split; of a folder
        without `shards.json` it has the files for training, unless another split was asked for. An option that it has
        fixed (`source_format`, `split`, the arguments of `ReadAs`) is refused, and so are fields of `with_fields`; a
        cache is not read. Or an open `BatchSource` or `DocumentSource`.
    target
        "hdf5", "batch" or "npy" for batches, "stream" for an HDF5 stream of documents, or "megatron", "datatrove",
        "bin", "llmc" or "olmo" for documents in the files of another trainer; "auto": the format whose suffix the
        destination has, "hdf5" for a folder.
    destination
        One file if it ends in the suffix of the format, else a folder of shards, of this machine or in a bucket: such
        a store is written to `<its name>-<digest>.upload` in the current folder, uploaded with its index last, and
        removed there.
    source_format
        "npy", "hdf5", "batch", "stream", "parquet", "jsonl", "text" or a format of another trainer, such as
        "megatron"; "auto": that of the first file.
    tokenizer
        "byte", a file such as "tok.json" or "tok.tiktoken", or "tiktoken:NAME".
    text_column
        The column, or JSON key, that holds the text; None: "text".
    ids_column
        The column that has a list of ids in each row; None: "input_ids", else "tokens".
    field_columns
        The columns of lists that are aligned with the ids, such as ("labels", "loss_mask"); None: every other list of
        numbers.
    rows
        Of rows of ids: "documents" of any length, or "records": all have one length, that of a record, and stay whole.
    id_column
        The column, or JSON key, that names each document: no two the same.
    metadata_columns
        The columns that are kept of each document, such as ("author", "url").
    boundary_token
        The special token after each document; None: that of the tokenizer.
    no_boundary
        Put no token between documents.
    boundary_token_id
        The token between documents in 1-D arrays, such as 50256.
    boundary
        The side of each document that has its boundary token: "after" or "before".
    max_document_tokens
        The length at which longer documents are cut; the boundary token counts.
    max_dropped
        The share of the lines, rows or files of text that may be dropped; None: 0.5. More of them are an error.
    max_line
        The size of the longest line of JSON lines, or of a text file, such as "1GiB"; None: 256 MiB. A longer one is an
        error: a file that was torn on a network disk is one line of zeros.
    source_dtype
        The dtype of the ids in files without a header, such as "uint16"; `dtype` is the stored one.
    skip_bytes
        The bytes of each such file before its ids.
    vocab_size
        Ids at or above it are refused.
    dataset
        The name of a dataset in an HDF5 file of another program.
    offsets
        The dataset in it of the offsets, or the ends, of documents in the values.
    axes
        "batch,record,token" or "record,token" if the axes of the dataset are these, and no entry is a mask or labels.
    channel
        The entry of the second of its three axes that has the ids, such as 0 of ids, mask and labels.
    field_channels
        The entries that have fields, such as `{"loss_mask": 1, "labels": 2}`; it needs `channel`.
    unwritten
        Rows of such a dataset that were never written: "fill" takes its fill value, "drop" leaves them out.
    split
        "all": all files are one split, whatever their names tell; else the splits that they tell are kept.
    layout
        Of documents: "batches" for packed rows, or "stream" for the documents one after the other.
    packing
        The way in which documents become rows: "concat", "best-fit" or "pad".
    like
        A store from which shape, dtype, vocabulary size, shuffle, seed, remainder and number of shards are taken; an
        option that is given wins.
    batch_size
        Records of a batch.
    seq_len
        Tokens of a record.
    seed
        Decides the shuffle, and the draw of documents that are held out.
    shuffle
        Whether all records of a split are shuffled; False: they have the order of the source.
    remainder
        Records that do not fill the last batch: "drop" or "pad"; "error" refuses them.
    pad_id
        The token of padding.
    val_fraction
        The share of the documents, or of the records of arrays, that is held out as the split "val".
    val_last_shard
        Hold out the last source file as the split "val".
    dtype
        The stored dtype: "uint8", "uint16" or "uint32"; "auto": the smallest one that the source or `vocab_size` proves
        to hold all ids; "keep": that of the source.
    codec
        Compresses the tokens: "zstd" or "gzip", with a level such as "zstd:3".
    live
        Let other processes read the committed batches.
    tokens_only
        Leave fields and documents behind, which `.batch` and `.npy` files do not hold.
    note
        Words for people, which the store keeps: its origin, its licence.
    field_set
        The names of the field sets of a store that are copied with its tokens, such as ("teacher",); () leaves all
        behind. By default a copy of the same records keeps all that are finished.
    shards
        The number of shards.
    shard_size
        The bytes of a shard, also as text: "4GiB".
    shard_per_source
        For a stream: a shard for each source file, also of more than 500.
    memory
        Bytes that all processes of a node may take together, also as text: "4GiB".
    shuffle_method
        "direct" gathers record by record, "two-pass" only reads and writes in sequence; "auto": the faster one.
    workers
        Local processes.
    threads
        Threads that tokenize, for each process.
    executor
        Who does the work: "local" processes, or the ranks of "mpi".
    shard_range
        (i, n): write part i of n, counted from 0, only; then merge them with `zb index merge`. Documents become parts
        of a stream, or of files of another trainer, and a stream becomes parts of batches.
    resume
        Keep the finished files of an interrupted run of the same arguments, and write the rest.
    force
        Replace an existing result, at the end and whole.
    drop_field_set
        The names of field sets that a replaced store has, such as ("teacher",), which are removed with it. A store that
        has others is not replaced.
    progress
        Called with the number of tokens that were written since the last call.
    engine
        Runs the tasks instead of `workers` or `executor`.
    **unknown
        No other name is an option.

    Returns
    -------
    Report or None
        The report; None in an MPI rank that has only served the first one.

    Raises
    ------
    ExistsError
        If the destination exists.
    ConvertError
        If the disk has no space for it, or the source cannot be converted as asked.
    ArgumentError
        If the arguments contradict each other, or one has a name that no option has.

    Examples
    --------
    >>> report = convert("tokens", "hdf5", "train-h5", batch_size=32, seq_len=512)  # doctest: +SKIP
    """
    given: dict[str, Any] = locals()  # by the names of the arguments and options of `Conversion`
    unknown = given.pop("unknown")
    return run(Conversion(**given, **unknown))
