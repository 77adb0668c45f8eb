"""`zb bench`: times the reads of a training from the user's own data, and names the setting to choose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import FROM_1, STORE, Output, Progress, dataset_options, output_options
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.commands.timing import Way, WayTimes
    from zb_hdf5.read_as import ReadAs

#: Characters of the bar of the fastest way.
RATE_BAR_WIDTH: Final = 20

_timed_option = option_group("Reads that are timed")


@click.command("bench", cls=GroupedCommand)
@click.argument("path", type=STORE)
@_timed_option("--seconds", type=click.FloatRange(1), default=45.0, help="Time for all rounds together.")
@_timed_option("--batch-size", type=FROM_1, help="Records of a batch. [default: as stored; of a token stream 32]")
@_timed_option("--seq-len", type=FROM_1, help="Tokens of a record. [default: as stored; of a token stream 512]")
@dataset_options
@output_options
def zb_bench(
    path: Path, seconds: float, batch_size: int | None, seq_len: int | None, read_as: ReadAs, split: str | None
) -> Output:
    """Time the batches of a training from PATH, by each setting of the loader, on this machine.

    Each setting gives int64 batches in a shuffled order, of tokens that are compared first. They are read in turns,
    round after round, and a bare mapping of the same files is the limit. If a busy machine or the spread of the
    rounds makes the rows noise, no setting is named. PATH is a store, or files of another trainer.

    \b
    Example: zb bench data/train
    Example: zb bench data/train --split train --seconds 20
    """
    from zb_hdf5.packages import require_package

    require_package("torch", "torch")
    from zb_hdf5.commands import timing
    from zb_hdf5.files.named_splits import AUTO_SPLIT
    from zb_hdf5.spec import STREAM_LAYOUT
    from zb_hdf5.store.found_path import found_at
    from zb_hdf5.store.opening import open_reader, split_of_training

    found = found_at(path, read_as=read_as, split=split or AUTO_SPLIT)
    split = split_of_training(found, split or AUTO_SPLIT)
    if found.layout == STREAM_LAYOUT:
        batch_size = batch_size or 32
        seq_len = seq_len or 512
    machine = timing.machine()  # now: its load is of other programs
    load = os.getloadavg()[0]
    options: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "read_as": read_as, "split": split}
    with open_reader(path, access="auto", **options) as reader:
        steps = timing.steps_of(path, reader)
        batch_tokens = reader.batch_size * reader.seq_len
        ways = timing.ways_of(path, reader, options)
        timing.require_equal(ways, path)
        times = _timed(ways, steps, batch_tokens, seconds)
        rows = [each.to_json(batch_tokens) for each in times]
        shape = f"{steps:,} of {reader.num_batches:,} batches of {reader.batch_size:,} x {reader.seq_len:,}"
    lines = [("path", str(path)), ("machine", machine), ("a pass", shape)]
    noise = timing.noise(rows, load)
    advice = f"not judged: {noise}; time it again on a quiet machine" if noise else timing.advice(rows)
    report = {"path": str(path), "machine": machine, "steps": steps, "rows": rows, "advice": advice}
    report["judged"] = not noise
    return Output(report, lines, [*_table(rows), "", f"choose  {advice}"])


def _timed(ways: list[Way], steps: int, batch_tokens: int, seconds: float) -> list[WayTimes]:
    """Time all ways, and show the progress."""
    from zb_hdf5.commands.timing import measured

    tokens = 0
    with Progress("timing", 0) as progress:

        def after_pass(share: float) -> None:
            nonlocal tokens
            tokens += steps * batch_tokens
            progress.advance(steps * batch_tokens, round(tokens / share))

        return measured(ways, steps, seconds, after_pass)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table, with a bar for the rate of each way."""
    fastest = max(row["tokens_per_s"] for row in rows)
    width = max(len(row["way"]) for row in rows)
    heads = f"{'M tokens/s':>10}  {'min':>7} {'max':>7}  {'first ms':>8}  {'p50 µs':>8}  {'p99 µs':>8}  checked"
    lines = ["", f"{'':<{width}}  {heads}"]
    for row in rows:
        millions = [row[name] / 1e6 for name in ("tokens_per_s", "tokens_per_s_min", "tokens_per_s_max")]
        times = f"{row['first_batch_ms']:>8.1f}  {row['step_us_p50']:>8.1f}  {row['step_us_p99']:>8.1f}"
        rates = f"{millions[0]:>10,.1f}  {millions[1]:>7,.0f} {millions[2]:>7,.0f}"
        checked = "yes" if row["is_checked"] else "no"
        bar = "█" * max(1, round(RATE_BAR_WIDTH * row["tokens_per_s"] / fastest))
        lines.append(f"{row['way']:<{width}}  {rates}  {times}  {checked:<7}  {bar}")
    return lines
