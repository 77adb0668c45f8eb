"""`zb plan`: the steps, bytes, opens and times of a training, before a GPU is booked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zb_hdf5.console import FROM_1, STORE, Output, counted, dataset_options, output_options
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.read_as import ReadAs

#: The words for each figure.
NAMES_OF_FIGURES: Final = {
    "records": "records",
    "steps": "steps",
    "left_out": "left out",
    "tokens_per_step": "tokens a step",
    "epochs": "epochs",
    "hours": "hours",
    "reads_per_step": "reads a step",
    "bytes_per_step": "bytes a step",
    "node_bytes_per_step": "of a node",
    "node_bytes_per_epoch": "node, epoch",
    "node_bytes_per_s": "rate",
    "bytes_per_s": "rate of all",
    "opens_at_opening": "at opening",
    "node_opens_at_opening": "of a node",
    "looks_at_opening": "looks",
    "node_looks_at_opening": "of a node",
    "opening_bytes": "bytes",
    "node_opening_bytes": "of a node",
    "index_bytes": "index",
    "opens_per_epoch": "in an epoch",
    "node_opens_per_epoch": "of a node",
    "opens_of_all": "opens of all",
    "proof_bytes": "proofs",
    "node_proof_bytes": "of a node",
    "first_batch_s": "first batch",
    "read_s": "later batch",
}

_job_option = option_group("Job")
_order_option = option_group("Loader, as in training")


@click.command("plan", cls=GroupedCommand)
@click.argument("path", type=STORE)
@_job_option("--ranks", type=FROM_1, required=True, help="Processes of the training, one for each GPU.")
@_job_option("--ranks-per-node", type=FROM_1, default=8, help="Processes of a node.")
@_job_option("--steps", type=FROM_1, help="Steps of the training. [default: one epoch]")
@_job_option("--step-time-s", type=click.FloatRange(0, min_open=True), help="Seconds of a step: gives rates and hours.")
@_order_option("--batch-size", type=FROM_1, help="Records of a batch on each rank. [default: as stored]")
@_order_option("--seq-len", type=FROM_1, help="Tokens of a record. [default: as stored]")
@_order_option(
    "--shuffle",
    type=click.Choice(["global", "records", "block", "sequential"]),
    default="global",
    help="Order of the loader.",
)
@dataset_options
@output_options
def zb_plan(
    path: Path,
    ranks: int,
    ranks_per_node: int,
    steps: int | None,
    step_time_s: float | None,
    batch_size: int | None,
    seq_len: int | None,
    shuffle: str,
    read_as: ReadAs,
    split: str | None,
) -> Output:
    """Plan a training from PATH: its steps, bytes, opened files and times, before a GPU is booked.

    PATH is opened as by rank 0 of so many, and its first batches are read. Each figure names its origin: counted by
    the loader itself, arithmetic on such counts, or measured here and now by one process.

    \b
    Example: zb plan data/train --ranks 4 --ranks-per-node 2 --step-time-s 0.5
    """
    from zb_hdf5.packages import require_package

    require_package("torch", "torch")
    from zb_hdf5.commands.training_plan import Job, planned
    from zb_hdf5.files.named_splits import AUTO_SPLIT

    job = Job(ranks, ranks_per_node, steps, step_time_s)
    options: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "shuffle": shuffle, "read_as": read_as}
    figures = planned(path, job, {**options, "split": split or AUTO_SPLIT})
    report = {
        "path": str(path),
        "ranks": ranks,
        "nodes": job.nodes,
        "figures": {name: {"value": figure.value, "how": figure.how} for name, figure in figures.items()},
    }
    lines = [("path", str(path)), ("job", f"{counted(ranks, 'rank')}, {counted(job.nodes, 'node')}")]
    lines += [(NAMES_OF_FIGURES[name], f"{figure.how:<10}  {figure.text}") for name, figure in figures.items()]
    return Output(report, lines)
