"""`zb convert parquet-to-hdf5`, `jsonl-to-hdf5` and `text-to-hdf5`: text to stores of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import ExistingPath, NewPath, Progress, counted, format_count, output_options, print_report

if TYPE_CHECKING:
    from zb_hdf5.converters.ingest.routing import Recipe
    from zb_hdf5.converters.ingest.to_batches import IngestReport
    from zb_hdf5.converters.ingest.to_streams import StreamReport
    from zb_hdf5.converters.pipeline.run import Report
    from zb_hdf5.text.documents import DocumentFile

#: kind of document file -> (its name in help, an example of a path, a sentence about its documents)
KINDS: Final = {
    "parquet": ("Parquet files of text", "corpus/", "Each row is a document."),
    "jsonl": ("JSON lines of text", "corpus.jsonl", "Each line (.jsonl, .ndjson, also .gz) is a document."),
    "text": ("plain text files", "books/", "Each file is a document, and must fit in memory."),
}
#: Text bytes per token, for the share of the work that progress shows.
BYTES_PER_TOKEN: Final = 4
AsJson = Callable[["Report"], dict[str, Any]]
AsLines = Callable[["Report"], list[tuple[str, str]]]


def add_text_commands(group: click.Group, as_json: AsJson, as_lines: AsLines) -> None:
    """Add the commands to the convert group, which says how the report of a conversion is printed."""
    for kind in KINDS:
        _add_command(group, kind, as_json, as_lines)


def _add_command(group: click.Group, kind: str, as_json: AsJson, as_lines: AsLines) -> None:
    what, example, documents = KINDS[kind]

    def run(src: tuple[Path, ...], dst: Path, layout: str, **options: Any) -> None:
        output = {name: options.pop(name) for name in ("as_json", "quiet")}
        if options.pop("shard_per_source"):
            _require_stream(layout, options)
        work = _Work(src, kind, dst, options, output)
        if layout == "stream":
            _require_defaults(_BATCHES_ONLY)
            streams = work.streams()
            if streams is not None:
                print_report(_streams_json(streams), _streams_lines(streams), **output)
            return
        report = work.batches()
        if report is not None:
            # the conversion reports speed and shuffle of the last part of the work only
            lines = [line for line in as_lines(report.conversion) if line[0] not in ("speed", "shuffle")]
            lines += _lines(report)
            print_report({**as_json(report.conversion), **_as_json(report)}, lines, **output)

    run.__doc__ = (
        f"Convert {what} to an HDF5 store.\n\n"
        f"{documents} The command tokenizes the documents, packs them into rows of --seq-len tokens, and shuffles the "
        "rows once. While it runs, it needs as much disk again as the store. With --layout stream it keeps documents "
        "as they are, one after the other. A folder stands for all such files in it and below it.\n\n\b\n"
        f"Example: zb convert {kind}-to-hdf5 {example} train-h5 \\\n"
        "           --tokenizer hf:tok.json --seq-len 2048 --packing best-fit"
    )
    command: Callable[..., Any] = output_options(run)
    for option in reversed(_OPTIONS if kind != "text" else [each for each in _OPTIONS if each is not _TEXT_COLUMN]):
        command = option(command)
    command = click.argument("dst", type=NewPath())(command)
    command = click.argument("src", type=ExistingPath(), nargs=-1, required=True)(command)
    group.command(f"{kind}-to-hdf5")(command)


def _option(name: str, kind: Any, default: Any, help_text: str) -> Callable[..., Any]:
    return click.option(name, type=kind, default=default, show_default=True, help=help_text)


_POSITIVE, _NATURAL = click.IntRange(1), click.IntRange(0)
_TEXT_COLUMN: Final = _option("--text-column", str, "text", "Column, or JSON key, that holds the text.")
#: Options that make no sense for a stream.
_BATCHES_ONLY: Final = ("packing", "batch_size", "seq_len", "shuffle", "remainder", "pad_id")
_OPTIONS: Final = [
    _option(
        "--layout",
        click.Choice(["batches", "stream"]),
        "batches",
        "batches: packed rows; stream: the documents one after the other.",
    ),
    click.option("--tokenizer", required=True, help="byte, tiktoken:NAME, tiktoken:FILE or hf:tokenizer.json."),
    _TEXT_COLUMN,
    click.option("--boundary-token", help="Special token behind each document. [default: <|endoftext|>]"),
    click.option("--no-boundary", is_flag=True, help="Put no token between documents."),
    click.option("--max-document-tokens", type=_POSITIVE, help="Cut longer documents."),
    _option("--packing", click.Choice(["concat", "best-fit", "pad"]), "concat", "How documents become rows."),
    _option("--batch-size", _POSITIVE, 32, "Rows per batch."),
    _option("--seq-len", _POSITIVE, 512, "Tokens per row."),
    _option("--seed", _NATURAL, 42, "Seed of the shuffle of rows, and of the draw of documents held out."),
    _option("--shuffle", click.Choice(["global", "none"]), "global", "Order of the rows within a split."),
    _option(
        "--remainder",
        click.Choice(["drop", "pad", "error"]),
        "pad",
        "Rows that do not fill the last batch: leave out, fill up, or fail.",
    ),
    click.option("--pad-id", type=_NATURAL, help="Token of padding. [default: the boundary token, else 0]"),
    click.option(
        "--val-fraction",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        help="Share of the documents that is held out as split val.",
    ),
    click.option("--val-last-shard", is_flag=True, help="Hold out the last source file as split val."),
    click.option(
        "--shards",
        type=_POSITIVE,
        help="Shards of the training split. [default: 1 GiB each; of streams: one per source file]",
    ),
    click.option(
        "--shard-per-source", is_flag=True, help="With --layout stream: a shard per source file, as without --shards."
    ),
    click.option("--workers", type=_POSITIVE, help="Local processes. [default: the cores]"),
    click.option(
        "--threads", type=_POSITIVE, help="Threads that tokenize, per process. [default: its share of the cores]"
    ),
    _option(
        "--executor",
        click.Choice(["local", "mpi", "dask"]),
        "local",
        "Who tokenizes: local processes, MPI ranks, a dask cluster.",
    ),
    click.option("--scheduler-file", type=NewPath(), help="File in which the dask scheduler has left its address."),
    click.option("--resume", is_flag=True, help="Keep the finished work of an interrupted run, do the rest."),
    click.option(
        "--force", is_flag=True, help="Replace an existing destination when the new one is whole; also with --resume."
    ),
]


class _Work:
    """The work of both layouts, with their options."""

    def __init__(
        self, src: tuple[Path, ...], kind: str, dst: Path, given: dict[str, Any], output: dict[str, bool]
    ) -> None:
        from zb_hdf5.converters.pipeline.engines import default_workers, require_own_workers
        from zb_hdf5.text.documents import open_documents

        self._kind, self._dst, self._given, self._output = kind, dst, given, output
        self._files = open_documents(src, kind, given.pop("text_column", "text"))
        self._recipe = _recipe(given)
        self._engine = {name: given.pop(name) for name in ("executor", "scheduler_file")}
        require_own_workers(self._engine["executor"], given["workers"])
        cores, num_groups = default_workers(), sum(file.num_row_groups for file in self._files)
        self._workers = min(given.pop("workers") or cores, num_groups)
        self._num_threads = given.pop("threads") or max(1, cores // self._workers)
        self._force, self._resume = given.pop("force"), given.pop("resume")

    def batches(self) -> IngestReport | None:
        """Write a batch store; None in a rank of an MPI job that only serves the first one, or if it is there."""
        from zb_hdf5.converters.ingest.to_batches import TextOptions, ingest_batches, is_ingested
        from zb_hdf5.converters.pipeline.engines import open_engine

        given = self._given
        options = TextOptions(shuffle=given.pop("shuffle") == "global", num_shards=given.pop("shards"), **given)
        if self._goes_on_from_result() and is_ingested(self._files, self._kind, self._dst, self._recipe, options):
            self._say_done()
            return None
        with open_engine(workers=self._workers, **self._engine) as engine:
            if engine is None:
                return None
            with self._progress() as progress:
                return ingest_batches(
                    self._files, self._kind, self._dst, self._recipe, options, engine=engine,
                    num_threads=self._num_threads, overwrite=self._force, resume=self._resume,
                    progress=progress.advance, kept=progress.keep,
                )  # fmt: skip

    def streams(self) -> StreamReport | None:
        """Write a store of token streams; None as for `batches`."""
        from zb_hdf5.converters.ingest.to_streams import ShardedTokenizationPipeline
        from zb_hdf5.converters.pipeline.engines import open_engine

        given = {name: self._given[name] for name in ("val_fraction", "val_last_shard", "seed")}
        pipeline = ShardedTokenizationPipeline(
            self._files, self._kind, self._recipe, num_shards=self._given["shards"], **given
        )
        if self._goes_on_from_result() and pipeline.is_done(self._dst):
            self._say_done()
            return None
        with open_engine(workers=self._workers, **self._engine) as engine:
            if engine is None:
                return None
            with self._progress() as progress:
                return pipeline.run(
                    self._dst, engine=engine, num_threads=self._num_threads, overwrite=self._force,
                    resume=self._resume, progress=progress.advance, kept=progress.keep,
                )  # fmt: skip

    def _goes_on_from_result(self) -> bool:
        return self._resume and not self._force and self._dst.is_dir()

    def _say_done(self) -> None:
        print_report(
            {"path": str(self._dst), "done": True},
            [("there is", f"{self._dst} already, made of these files in this way: nothing to do")],
            **self._output,
        )

    def _progress(self) -> Progress:
        return Progress("tokenizing", _about_tokens(self._files), enabled=not self._output["quiet"])


def _require_defaults(names: tuple[str, ...]) -> None:
    """Raise `ArgumentError` if an option was given that a stream has no use for."""
    from click.core import ParameterSource

    from zb_hdf5 import ArgumentError

    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ArgumentError(f"--{name.replace('_', '-')} belongs to --layout batches: a stream has no rows")


def _require_stream(layout: str, options: dict[str, Any]) -> None:
    """Raise `ArgumentError` if a shard per source cannot be: for rows are packed and shuffled over all sources."""
    from zb_hdf5 import ArgumentError

    if layout != "stream":
        raise ArgumentError("--shard-per-source belongs to --layout stream: rows are shuffled over all sources")
    if options["shards"]:
        raise ArgumentError("pass either --shards or --shard-per-source, not both")


def _recipe(given: dict[str, Any]) -> Recipe:
    from zb_hdf5 import ArgumentError
    from zb_hdf5.converters.ingest.routing import Recipe
    from zb_hdf5.text.tokenizers import load_tokenizer

    spec, text, none = given.pop("tokenizer"), given.pop("boundary_token"), given.pop("no_boundary")
    limit = given.pop("max_document_tokens")
    if none:
        if text is not None:
            raise ArgumentError("pass either --boundary-token or --no-boundary, not both")
        return Recipe(spec, None, limit)
    tokenizer = load_tokenizer(spec)
    boundary = tokenizer.boundary_token_id if text is None else tokenizer.special_token_id(text)
    if boundary is None:
        known = ", ".join(tokenizer.special_tokens) or "none"
        raise ArgumentError(f"tokenizer {spec}: pass --boundary-token (it has: {known}), or --no-boundary")
    return Recipe(spec, boundary, limit)


def _about_tokens(files: list[DocumentFile]) -> int:
    return sum(file.path.stat().st_size for file in files) // BYTES_PER_TOKEN


def _as_json(report: IngestReport) -> dict[str, Any]:
    return {
        "documents": report.tally.documents,
        "documents_dropped": report.tally.dropped.counts,
        "documents_dropped_first": report.tally.dropped.first,
        "packing": report.packing,
        "batches_of_split": report.batches_of_split,
        "seconds": round(report.seconds, 3),
        **_rate_json(report.tally.accounts.tokens_in, report.tokens_kept, report.seconds),
    }


def _lines(report: IngestReport) -> list[tuple[str, str]]:
    splits = ", ".join(
        f"{counted(count, 'batch', 'batches')} {split}" for split, count in report.batches_of_split.items()
    )
    return [
        ("documents", f"{report.tally.documents:,}, {report.packing} packing: {splits}"),
        ("speed", _speed(report.tally.accounts.tokens_in, report.tokens_kept, report.seconds)),
        *report.tally.dropped.lines(),
    ]


def _speed(tokens: int, kept: int, seconds: float) -> str:
    """Rate what this run tokenized, not the tokens of an earlier run."""
    note = f" (kept {kept:,} tokens, tokenized {tokens - kept:,})" if kept else ""
    return f"{seconds:.2f} s{note}, {format_count((tokens - kept) / seconds)}tok/s"


def _rate_json(tokens: int, kept: int, seconds: float) -> dict[str, int]:
    return {"tokens_kept": kept, "tokens_per_second": round((tokens - kept) / seconds)}


def _streams_json(report: StreamReport) -> dict[str, Any]:
    index = report.index
    return {
        "path": str(report.destination),
        "dtype": index.dtype.name,
        "num_shards": len(index.shards),
        "shards_kept": report.shards_kept,
        "shards_written": len(index.shards) - report.shards_kept,
        "documents": index.document_count,
        "documents_dropped": report.tally.dropped.counts,
        "documents_dropped_first": report.tally.dropped.first,
        "tokens_in": report.tally.accounts.tokens_in,
        "tokens_stored": index.token_count,
        "tokens_dropped": report.tally.accounts.dropped,
        "sha256": index.sha256,
        "seconds": round(report.seconds, 3),
        **_rate_json(report.tally.accounts.tokens_in, report.tokens_kept, report.seconds),
    }


def _streams_lines(report: StreamReport) -> list[tuple[str, str]]:
    index, accounts = report.index, report.tally.accounts
    cut = " + ".join(f"{tokens:,} {reason}" for reason, tokens in accounts.dropped.items()) or "0"
    val = sum(shard.split != "train" for shard in index.shards)
    shards = counted(len(index.shards), "shard")
    if report.shards_kept:
        shards = f"kept {report.shards_kept:,} shards, wrote {len(index.shards) - report.shards_kept:,}"
    return [
        ("wrote", f"{report.destination} ({shards}{f', {val:,} of them val' if val else ''})"),
        ("documents", f"{index.document_count:,}"),
        ("tokens", f"{accounts.tokens_in:,} in = {index.token_count:,} stored + {cut} dropped"),
        ("sha256", index.sha256),
        ("speed", _speed(accounts.tokens_in, report.tokens_kept, report.seconds)),
        *report.tally.dropped.lines(),
    ]
