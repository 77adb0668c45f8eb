"""Distil a teacher whose values are computed once and stored: `python examples/distill.py`.

Three processes write the k best next tokens and their log-probabilities beside the tokens. One of them is killed and
started again. Then a student trains on these values on one rank, stops, and goes on with two. The example compares the
values with the teacher, and the losses with those of a loop that has the teacher in memory. The text is the source code
of the Python standard library; the tokens are its bytes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT

from zb_hdf5 import Loader, convert, open_field_set

VOCAB_SIZE: Final = 256
SEQ_LEN: Final = 64
NUM_RECORDS: Final = 768
STORED_BATCH: Final = 8
GLOBAL_BATCH: Final = 16
TOP_K: Final = 8
PART_BYTES: Final = 200_000
FIELDS: Final = {"ids": ("i4", (TOP_K,)), "logprobs": ("f2", (TOP_K,))}
NUM_WRITERS: Final = 3
MAKER: Final = "examples/distill.py"
TEACHER_STEPS: Final = 60
STEPS: Final = 40
STOP: Final = 20
#: Of losses: another shape of a batch may round a log-probability to another f2, and training goes on with it.
TEACHER_TOLERANCE: Final = 1e-2
#: Of losses: two ranks add the same gradients in another order.
RANKS_TOLERANCE: Final = 1e-3
#: The ids and log-probabilities of some records.
Values = tuple[Tensor, Tensor]


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Store the values of a teacher, train a student on them, and compare both with the teacher itself."""
    torch.set_num_threads(1)  # the same sums in every process
    if context.invoked_subcommand is None:
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="zb-distill-") as folder:
            distil(Path(folder))
        click.echo(f"\nAll of it holds. {time.monotonic() - start_s:.0f} seconds.")


def distil(folder: Path) -> None:
    """Run all steps inside a folder."""
    click.echo("1. Tokens, and a teacher of them")
    make_tokens(folder)
    train_teacher(folder)
    click.echo("\n2. Three processes write the values; one is killed and started again")
    write_all(folder)
    compare_values(folder)
    click.echo("\n3. A student on the stored values, and one beside the teacher")
    whole = Run(folder)
    whole.train(STEPS, stored_values)
    compare_with_live_teacher(folder, whole)
    click.echo("\n4. Stop on one rank, go on with two")
    stop_and_go_on(folder, whole)


def store_of(folder: Path) -> Path:
    """Return the path of the tokens."""
    return folder / "train-h5"


def make_tokens(folder: Path) -> None:
    """Write records of bytes of the standard library as a store."""
    needed = NUM_RECORDS * SEQ_LEN
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes() if len(text) < needed else b""
    np.save(folder / "rows.npy", np.frombuffer(text[:needed], np.uint8).reshape(-1, SEQ_LEN).astype(np.uint16))
    convert(folder / "rows.npy", "hdf5", store_of(folder), batch_size=STORED_BATCH, vocab_size=VOCAB_SIZE)
    click.echo(f"{NUM_RECORDS} records of {SEQ_LEN} tokens")


def train_teacher(folder: Path) -> None:
    """Teach a model a little, so that it is surer of some tokens than of others, and save it."""
    torch.manual_seed(0)
    model = GPT(VOCAB_SIZE, SEQ_LEN, width=64, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Loader(store_of(folder), batch_size=GLOBAL_BATCH, seed=0, rank=0, world_size=1, targets=True) as loader:
        for _ in range(TEACHER_STEPS):
            loss = model(*loader.get_batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), folder / "teacher.pt")
    click.echo(f"the teacher has a loss of {loss.item():.2f} nats after {TEACHER_STEPS} steps")


def load_teacher(folder: Path) -> GPT:
    """Return the teacher as it was saved."""
    teacher = GPT(VOCAB_SIZE, SEQ_LEN, width=64, layers=2)
    teacher.load_state_dict(torch.load(folder / "teacher.pt", weights_only=True))
    return teacher


@torch.no_grad()
def top_k(teacher: GPT, tokens: Tensor) -> Values:
    """Return the best next tokens after each token, and their log-probabilities, as they are stored."""
    best = teacher.logits(tokens).log_softmax(-1).topk(TOP_K)
    return best.indices.int(), best.values.half()


def top_k_by_record(teacher: GPT, tokens: Tensor) -> Values:
    """Return those of each record from a call of its own: they do not depend on the other records of a batch."""
    values = [top_k(teacher, row.unsqueeze(0)) for row in tokens]
    return torch.cat([ids for ids, _ in values]), torch.cat([logprobs for _, logprobs in values])


# --- values -----------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("job", type=int)
def write(folder: Path, job: int) -> None:
    """Write values of records that have none, and print their numbers; after each step a line of stdin is read."""
    teacher = load_teacher(folder)
    with open_field_set(store_of(folder), "teacher", FIELDS, maker=MAKER, part_bytes=PART_BYTES) as made:
        for step in made.missing(batch_size=4, job=job, num_jobs=NUM_WRITERS, quiet=True):
            ids, logprobs = top_k_by_record(teacher, step["tokens"])
            made.write(step["records"], ids=ids, logprobs=logprobs)
            click.echo(" ".join(map(str, step["records"].tolist())))
            sys.stdin.readline()  # once stdin is closed, nothing waits here


class Writer:
    """A process that writes values; it waits after each step, until it may go on.

    Parameters
    ----------
    folder
        The folder of the example.
    job
        The number of the process.
    """

    def __init__(self, folder: Path, job: int) -> None:
        command = [sys.executable, __file__, "write", str(folder), str(job)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> int:
        """Let it end a step; return the number of its records."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise click.ClickException("a writer has no pipes")
        count = len(process.stdout.readline().split())
        process.stdin.write("\n")
        return count

    def run_out(self) -> int:
        """Let it write all that nobody else has; return the number of its records."""
        written = len(self._process.communicate()[0].split())
        require(self._process.returncode == 0, f"process {self._process.pid} wrote {written} more, and ended by itself")
        return written

    def kill(self) -> int:
        """Kill it, wherever it is; return its exit status."""
        self._process.kill()
        self._process.communicate()
        return self._process.returncode


def write_all(folder: Path) -> None:
    """Write all values by three processes, of which one is killed while it has a claim."""
    writers = [Writer(folder, job) for job in range(NUM_WRITERS)]
    try:
        count = sum(writer.step() for writer in writers)
        require(writers[0].kill() == -signal.SIGKILL, "writer 0 was ended by SIGKILL, and left its claim")
        writers[0] = Writer(folder, 0)
        count += writers[0].step()
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            count += sum(pool.map(Writer.run_out, writers))
    finally:
        for writer in writers:
            writer.kill()
    with open_field_set(store_of(folder), "teacher") as made:
        require(made.num_missing == 0, f"all {NUM_RECORDS} records have values")
        require(count == NUM_RECORDS, "no record was written twice")
        made.finish()


def open_loader(folder: Path, rank: int = 0, world_size: int = 1, fields: tuple[str, ...] = ()) -> Loader[Any]:
    """Return the loader of a student: its order is another than that of the writers."""
    size = GLOBAL_BATCH // world_size
    path = store_of(folder)
    return Loader(path, batch_size=size, shuffle="records", seed=1, rank=rank, world_size=world_size, fields=fields)


def compare_values(folder: Path) -> None:
    """Compare each stored value with the teacher's for the same tokens."""
    teacher = load_teacher(folder)
    wrong = count = 0
    with open_loader(folder, fields=("teacher/ids", "teacher/logprobs")) as loader:
        for step in loader:
            ids, logprobs = top_k_by_record(teacher, step["tokens"])
            stored = step["teacher/logprobs"]
            wrong += int((step["teacher/ids"] != ids).sum())
            wrong += int((stored.view(torch.int16) != logprobs.view(torch.int16)).sum())
            count += ids.numel() + logprobs.numel()
    require(count == 2 * NUM_RECORDS * SEQ_LEN * TOP_K, f"a loader gives all {count:,} values")
    require(wrong == 0, "each is bit for bit the teacher's for its token, in i4 and f2")


# --- the student ------------------------------------------------------------------------------------------------------


class Student(nn.Module):
    """A smaller model, and its distance from the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(VOCAB_SIZE, SEQ_LEN, width=32, layers=1)

    def forward(self, tokens: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
        """Return the mean KL divergence from the teacher's best tokens, in nats; both are normalized over these."""
        ours = self.model.logits(tokens).gather(-1, ids.long()).log_softmax(-1)
        theirs = logprobs.float().log_softmax(-1)
        return (theirs.exp() * (theirs - ours)).sum(-1).mean()


def stored_values(step: dict[str, Tensor]) -> Values:
    """Return the values that the loader has read."""
    return step["teacher/ids"], step["teacher/logprobs"]


class Run:
    """A student, its optimizer and its loader; its losses, and the records of each step as bytes.

    Parameters
    ----------
    folder
        The folder of the example.
    rank, world_size
        Of the processes that train it.
    """

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        torch.manual_seed(2)
        self.loader = open_loader(folder, rank, world_size, ("teacher/ids", "teacher/logprobs"))
        self.student = Student()
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=3e-3)
        self.world_size = world_size
        self.losses: list[float] = []
        self.seen: list[list[str]] = []

    def train(self, steps: int, values_of: Callable[[dict[str, Tensor]], Values]) -> None:
        """Train for some steps on the values of a function."""
        model = DistributedDataParallel(self.student) if self.world_size > 1 else self.student
        for _ in range(steps):
            step = self.loader.get_batch()
            loss = model(step["tokens"], *values_of(step))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            mean = loss.detach().clone()
            if self.world_size > 1:
                dist.all_reduce(mean)
            self.losses.append(mean.item() / self.world_size)
            self.seen.append([bytes(row.tolist()).hex() for row in step["tokens"]])

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        parts = {"student": self.student, "optimizer": self.optimizer, "loader": self.loader}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        checkpoint = torch.load(path, weights_only=True)
        self.student.load_state_dict(checkpoint["student"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.loader.load_state_dict(checkpoint["loader"])


def compare_with_live_teacher(folder: Path, whole: Run) -> None:
    """Train again on the same records, with the teacher called at each step."""
    teacher = load_teacher(folder)
    by_record = Run(folder)
    by_record.train(STEPS, lambda step: top_k_by_record(teacher, step["tokens"]))
    by_batch = Run(folder)
    by_batch.train(STEPS, lambda step: top_k(teacher, step["tokens"]))
    click.echo(f"KL {whole.losses[0]:.4f} -> {whole.losses[-1]:.4f} nats in {STEPS} steps")
    require(whole.losses[-1] < 0.7 * whole.losses[0], "the student learns")
    require(whole.seen == by_record.seen == by_batch.seen, "both loops see the same records in each step")
    require(whole.losses == by_record.losses, "called for each record, the teacher gives equal losses")
    require_near(
        whole.losses, by_batch.losses, TEACHER_TOLERANCE, "called for each batch, the teacher gives the same losses"
    )


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("rank", type=int)
@click.argument("world_size", type=int)
def go_on(folder: Path, rank: int, world_size: int) -> None:
    """Go on from the checkpoint as one of several ranks, and write what it saw."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    run = Run(folder, rank, world_size)
    run.load(folder / "checkpoint.pt")
    run.train(STEPS - STOP, stored_values)
    (folder / f"rank{rank}.json").write_text(json.dumps({"losses": run.losses, "seen": run.seen}))
    dist.destroy_process_group()


def stop_and_go_on(folder: Path, whole: Run) -> None:
    """Stop a run on one rank, go on with two, and compare with the run that never stopped."""
    stopped = Run(folder)
    stopped.train(STOP, stored_values)
    stopped.save(folder / "checkpoint.pt")
    ranks = [subprocess.Popen([sys.executable, __file__, "go-on", str(folder), str(rank), "2"]) for rank in range(2)]
    codes = [process.wait() for process in ranks]
    require(codes == [0, 0], f"two ranks went on from step {STOP} to {STEPS}")
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    seen = [ours + theirs for ours, theirs in zip(first["seen"], second["seen"], strict=True)]
    require(stopped.seen + seen == whole.seen, "the records of all steps are those of one rank that never stopped")
    require(stopped.losses == whole.losses[:STOP], "the losses before the stop are equal")
    require_near(first["losses"], whole.losses[STOP:], RANKS_TOLERANCE, "the losses after the stop are the same")


def require_near(found: list[float], expected: list[float], tolerance: float, claim: str) -> None:
    """Compare losses within the tolerance, and print the largest difference."""
    worst = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    require(worst <= tolerance, f"{claim}, within {tolerance:g} relative (largest: {worst:.1e})")


def require(condition: bool, claim: str) -> None:
    """Print a claim that holds, or end the example."""
    if not condition:
        raise click.ClickException(f"the example failed: this is false: {claim}")
    click.echo(f"✓ {claim}")


if __name__ == "__main__":
    main()
