"""`zb`: look at stores, check them, convert them, and see it all work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zb_hdf5.console import CommandGroup, Progress, format_bytes, format_count, output_options, print_report
from zb_hdf5.errors import UnavailableError

if TYPE_CHECKING:
    from zb_hdf5.fetch import FetchReport
    from zb_hdf5.verifystream import ShardReport

_PATH: Any = click.Path(exists=True, path_type=Path)


class ZbGroup(CommandGroup):
    """Adds `convert`, which lives outside this package and is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "convert"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "convert":
            from converters.cli import convert

            return convert
        return super().get_command(ctx, cmd_name)


@click.group(cls=ZbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="zb_hdf5")
def zb() -> None:
    """Token batches in HDF5 and .batch files: look at them, check them, convert them."""


@zb.command()
@click.argument("path", type=_PATH)
@click.option("--dataset", help="A 3-D dataset of an HDF5 file that is no store of ours.")
@output_options
def info(path: Path, dataset: str | None, as_json: bool, quiet: bool) -> None:
    """Say what PATH is: shape, dtype, tokens, shards, and how its batches lie on disk.

    \b
    Example: zb info data/train
    """
    from zb_hdf5.info import describe, describe_lines

    description = describe(path, dataset)
    print_report(description, describe_lines(description), as_json=as_json, quiet=quiet)


@zb.command()
@click.argument("path", type=_PATH)
@click.option("--workers", type=click.IntRange(1), help="Shards checked at the same time; by default the cores.")
@output_options
@click.pass_context
def verify(ctx: click.Context, path: Path, workers: int | None, as_json: bool, quiet: bool) -> None:
    """Check every batch and shard of PATH against its stored digests; exit 3 if one differs.

    \b
    Example: zb verify data/train
    """
    from zb_hdf5.verify import total_tokens, verify_store

    with Progress("verify", total_tokens(path), enabled=not quiet) as progress:
        reports = verify_store(path, workers=workers, progress=progress.advance)
    lines = [(report.path, _verdict(report)) for report in reports]
    bad = [report.problem for report in reports if report.problem is not None]
    lines.append(("verified", f"{len(reports) - len(bad)} of {len(reports)} files are as they were written"))
    print_report(
        {"ok": not bad, "files": [_as_json(report) for report in reports]}, lines, as_json=as_json, quiet=quiet
    )
    if bad:
        ctx.exit(max(problem.exit_code for problem in bad))


@zb.command()
@click.argument("stores", nargs=-1, required=True, metavar="STORE | NAME=STORE...")
@click.option("--state", "state_path", required=True, type=_PATH, help="A loader's state_dict() as JSON.")
@click.option("--step", required=True, type=click.IntRange(0), help="Step of the state's epoch (of the run, if mixed).")
@click.option("--batch-size", type=click.IntRange(1), help="Records per rank and step; by default as stored.")
@click.option("--world-size", type=click.IntRange(1), default=1, show_default=True, help="Ranks of the run.")
@output_options
def which(
    stores: tuple[str, ...],
    state_path: Path,
    step: int,
    batch_size: int | None,
    world_size: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say which shard, batch and rows made a training step, from a checkpoint's loader state.

    \b
    Example: zb which data/train --state loader.json --step 1200 --world-size 8
    Example: zb which web=data/web code=data/code --state mixed.json --step 1200
    """
    from zb_hdf5.which import origins, origins_lines

    found = origins(stores, state_path, step, batch_size, world_size)
    print_report({"step": step, "batches": found}, origins_lines(found), as_json=as_json, quiet=quiet)


@zb.command()
@click.argument("path", type=_PATH)
@click.option("--output", type=click.Path(path_type=Path), help="New file; by default beside PATH.")
@click.option("--batch-size", type=click.IntRange(1), help="Of a .batch whose header was never written.")
@click.option("--seq-len", type=click.IntRange(1), help="The same.")
@click.option("--dtype", type=click.Choice(["uint16", "uint32"]), help="The same.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")
@output_options
def repair(
    path: Path,
    output: Path | None,
    batch_size: int | None,
    seq_len: int | None,
    dtype: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Save the batches of PATH that hold into a new file; PATH itself stays as it is.

    \b
    Example: zb repair data/train.h5.partial
    """
    from zb_hdf5.repair import repair as repair_path
    from zb_hdf5.repair import shape_of_options

    shape = shape_of_options(batch_size, seq_len, dtype)
    reports = repair_path(path, output=output, shape=shape, overwrite=force, dry_run=dry_run)
    lines = [(report.path, report.line()) for report in reports]
    print_report({"files": [vars(report) for report in reports]}, lines, as_json=as_json, quiet=quiet)


@zb.group()
def tokenizer() -> None:
    """Make a tokenizer."""


@tokenizer.command()
@click.argument("src", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="tokenizer.json to write.")
@click.option("--vocab-size", type=click.IntRange(1), default=32768, show_default=True, help="With the boundary token.")
@click.option("--text-column", default="text", show_default=True, help="Column (or JSON key) that holds the text.")
@click.option("--force", is_flag=True, help="Replace what exists, at the end and whole.")
@output_options
def train(
    src: tuple[Path, ...], output: Path, vocab_size: int, text_column: str, force: bool, as_json: bool, quiet: bool
) -> None:
    """Train byte-level BPE on the text of SRC: .parquet, .jsonl, .jsonl.gz and .txt files, and folders of them.

    Writes a tokenizer.json for Hugging Face tokenizers and, beside it, a .tiktoken file of ranks that encodes the same.
    Memory grows with the number of different words, not with the text.

    \b
    Example: zb tokenizer train corpus/ --vocab-size 32768 -o tok.json
    """
    from zb_hdf5.documents import open_documents
    from zb_hdf5.tokenizer_training import train_tokenizer

    report = train_tokenizer(open_documents(src, column=text_column), output, vocab_size, overwrite=force)
    lines = [
        ("wrote", f"{report.path} and {report.ranks_path}"),
        ("tokens", f"{report.vocab_size:,}"),
        ("trained on", f"{report.documents - report.held_out_documents:,} of {report.documents:,} documents"),
        ("bytes per token", f"{report.bytes_per_token:.3f} on the {report.held_out_documents:,} held out"),
        ("digest", report.digest),
        *report.dropped.lines(),
    ]
    print_report(report.to_json(), lines, as_json=as_json, quiet=quiet)


@zb.group()
def index() -> None:
    """Work on the `shards.json` of stores."""


@index.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace what exists, at the end and whole.")
@output_options
def merge(path: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Publish PATH, whose shards were written by the jobs of an array with --shard-range.

    \b
    Example: zb index merge train-h5
    """
    from converters.merge import merge_parts

    merged = merge_parts(path, overwrite=force)
    report = {"path": str(path), "num_shards": len(merged.shards), "num_batches": merged.num_batches}
    lines = [("merged", f"{path}: {len(merged.shards):,} shards, {merged.num_batches:,} batches")]
    print_report({**report, "sha256": merged.sha256}, [*lines, ("sha256", merged.sha256)], as_json=as_json, quiet=quiet)


@index.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace a valid index; accept missing shards.")
@output_options
def rebuild(folder: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Make the lost or damaged shards.json of FOLDER anew from its shards.

    \b
    Example: zb index rebuild data/train
    """
    from zb_hdf5.rebuild import rebuild_index

    made = rebuild_index(folder, force=force)
    lost = ["shuffle", "source"]
    report = {"folder": str(folder), "shards": len(made.shards), "sha256": made.sha256, "not_recovered": lost}
    lines = [
        ("index", f"{len(made.shards):,} shards, {made.num_batches:,} batches, sha256 {made.sha256}"),
        ("not recovered", f"{' and '.join(lost)}: only the lost index had them"),
    ]
    print_report(report, lines, as_json=as_json, quiet=quiet)


@zb.command()
@click.argument("path", type=_PATH)
@output_options
@click.pass_context
def doctor(ctx: click.Context, path: Path, as_json: bool, quiet: bool) -> None:
    """Say what would stop or slow down training from PATH on this machine; exit 5 if something would stop it.

    \b
    Example: zb doctor data/train
    """
    from zb_hdf5.doctor import diagnose

    findings = diagnose(path)
    bad = any(finding.state == "problem" for finding in findings)
    lines = [(finding.name, finding.line()) for finding in findings]
    report = {"ok": not bad, "findings": [vars(finding) for finding in findings]}
    print_report(report, lines, as_json=as_json, quiet=quiet)
    if bad:
        ctx.exit(UnavailableError.exit_code)


@zb.command()
@click.argument("url_template")
@click.option("-n", "--count", required=True, type=click.IntRange(1), help="Number of files.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first file.")
@click.option("-w", "--workers", type=click.IntRange(1), default=4, show_default=True, help="Files at the same time.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=".", show_default=True, help="Folder for them."
)
@click.option("--sha256-file", type=_PATH, help="What each file must be: a list as sha256sum writes it.")
@output_options
@click.pass_context
def fetch(
    ctx: click.Context,
    url_template: str,
    count: int,
    first: int,
    workers: int,
    output: Path,
    sha256_file: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Download the numbered files of URL_TEMPLATE, whose number is a format field; go on where an earlier run stopped.

    \b
    Example: zb fetch "https://example.org/data/shard_{:05d}.parquet" -n 10 -w 4 -o text/
    """
    from zb_hdf5.fetch import fetch_shards, read_digests

    digests = None if sha256_file is None else read_digests(sha256_file)
    with Progress("fetch", 0, enabled=not quiet, unit="B") as progress:
        reports = fetch_shards(
            url_template, count, output, first=first, workers=workers, sha256=digests, progress=progress.advance
        )
    bad = [report.problem for report in reports if report.problem is not None]
    lines = [(report.path, f"FAILED: {report.problem}") for report in reports if report.problem is not None]
    size = format_bytes(sum(report.byte_count for report in reports if report.fetched))
    new = sum(report.fetched for report in reports)
    lines.append(("fetched", f"{new} of {count} files, {size}; {count - new - len(bad)} were there already"))
    print_report(
        {"ok": not bad, "files": [_as_json(report) for report in reports]}, lines, as_json=as_json, quiet=quiet
    )
    if bad:
        ctx.exit(max(problem.exit_code for problem in bad))


@zb.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the data here; by default a temporary folder.")
@click.option("--steps", type=click.IntRange(10), default=100, show_default=True, help="Training steps.")
@click.pass_context
def demo(ctx: click.Context, folder: Path | None, steps: int) -> None:
    """Tokenize this machine's Python library, convert, verify, compare, train, stop and resume.

    \b
    Example: zb demo
    """
    from zb_hdf5.demo import run_demo

    run_demo(ctx.find_root().command, folder, steps)


def _verdict(report: ShardReport) -> str:
    if report.problem is not None:
        return f"BAD: {report.problem}"
    no_digest = [] if set(report.checks) - {"face"} else ["structure only: no digest is stored with a lone .batch"]
    checks = ", ".join([*report.checks, *no_digest])
    size = f"{report.num_batches:,} batches, {format_count(report.token_count)}tokens"
    return f"ok ({checks}): {size}, sha256 {report.sha256[:16]}…"


def _as_json(report: ShardReport | FetchReport) -> dict[str, Any]:
    return {**vars(report), "problem": None if report.problem is None else str(report.problem)}
