"""Train a small GPT from a batch store, on any number of processes; resume on another number.

    zb convert npy-to-hdf5 tokens/ train-h5 --batch-size 32 --vocab-size 257
    torchrun --nproc-per-node 2 examples/train_gpt.py train-h5 --out run --steps 200
    torchrun --nproc-per-node 4 examples/train_gpt.py train-h5 --out run --steps 400    # from 200 on
    srun --ntasks 4 python examples/train_gpt.py train-h5 --out run --steps 600         # in a Slurm job, on any hosts
    python examples/train_gpt.py packed --out other --document-masks     # no token attends to another document

Every step of all processes together takes `--global-batch` records, whatever their number, so the order of the data
does not depend on it. The folder `--out` gets `checkpoint.pt`, `loader.json` (the loader's part of it),
`log.rank*.jsonl` (a line per step) and, with matplotlib, `loss.png`. Uses gloo on CPUs and nccl on GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from zb_hdf5 import Loader, resolve_rank


class Block(nn.Module):
    """One layer: causal self-attention, then a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, vocab_size: int, seq_len: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy in nats, over the targets that are not -100."""
        return functional.cross_entropy(self.logits(x, mask, positions).flatten(0, 1), y.flatten())

    def logits(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return those of the next token. Without a mask, each row is one text."""
        places = self.positions.weight[: x.shape[1]] if positions is None else self.positions(positions)
        hidden = self.tokens(x) + places
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


def document_mask(cu_seqlens: Tensor, rows: int, seq_len: int) -> Tensor:
    """Return which tokens each token attends to, those before it in its document: bool, (rows, 1, seq_len, seq_len).

    One byte for each pair of tokens of a row, on any device. On a GPU, `torch.nn.attention.varlen` and flash-attention
    take `cu_seqlens` as they are.
    """
    places = torch.arange(rows * seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens, places, right=True).view(rows, 1, seq_len)
    return (documents[..., :, None] == documents[..., None, :]).tril()


def model_inputs(step: Any) -> tuple[Tensor, ...]:
    """Return what the model takes of what the loader yields."""
    if isinstance(step, dict):
        x = step["tokens"]
        return x, step["targets"], document_mask(step["cu_seqlens"], *x.shape), step["position_ids"]
    return step


class Run:
    """Everything that a checkpoint holds, and how it is saved and found again."""

    def __init__(self, options: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
        if options.global_batch % world_size:
            raise SystemExit(f"--global-batch {options.global_batch} is not a multiple of {world_size} processes")
        torch.manual_seed(options.seed)
        self.rank = rank
        self.path = Path(options.out) / "checkpoint.pt"
        self.step = 0
        self.loader = Loader(
            options.data,
            seed=options.seed,
            rank=rank,
            world_size=world_size,
            batch_size=options.global_batch // world_size,
            device=device,
            targets=True,
            cache=options.cache,
            documents=("cu_seqlens", "position_ids") if options.document_masks else (),
        )
        reader = self.loader.batches
        vocab_size = options.vocab_size or reader.meta.vocab_size
        if not vocab_size and reader.corpus.max_token is None:
            raise SystemExit("the store has no vocabulary size: pass --vocab-size")
        vocab_size = vocab_size or reader.corpus.max_token + 1  # of a lone HDF5 file
        self.model = GPT(vocab_size, self.loader.seq_len, options.width, options.layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)

    def save(self) -> None:
        """Write a checkpoint on rank 0; the loader's state is the same on every rank."""
        if self.rank == 0:
            parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
            partial = self.path.with_suffix(".partial")
            torch.save({"step": self.step, **{name: part.state_dict() for name, part in parts.items()}}, partial)
            os.replace(partial, self.path)
            partial.write_text(json.dumps(self.loader.state_dict()))
            os.replace(partial, self.path.with_name("loader.json"))  # for zb stage and zb which

    def resume(self) -> None:
        """Load the checkpoint if there is one."""
        if self.path.exists():
            checkpoint = torch.load(self.path, weights_only=True, map_location="cpu")
            self.step = checkpoint["step"]
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.loader.load_state_dict(checkpoint["loader"])


def train(run: Run, options: argparse.Namespace, log: Path) -> None:
    model = DistributedDataParallel(run.model)
    while run.step < options.steps:
        inputs = model_inputs(run.loader.get_batch())
        run.optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        run.step += 1
        stats = run.loader.stats()
        loss_of_all = mean.item() / dist.get_world_size()
        record = {"step": run.step, "loss": loss_of_all, "data_wait_share": stats.waited_share}
        digest = hashlib.sha256(inputs[0].cpu().contiguous().numpy()).hexdigest()[:16]
        with open(log.with_suffix(f".rank{run.rank}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({**record, "data": digest}) + "\n")
        if run.rank == 0 and (run.step % options.log_every == 0 or run.step == options.steps):
            print(f"step {run.step:>6}  loss {loss_of_all:.3f}  {stats}", flush=True)
        if run.step % options.save_every == 0 or run.step == options.steps:
            run.save()


def plot(out: Path, log: Path) -> None:
    """Draw the loss of all steps, also of those in earlier runs."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no curve is drawn: pip install matplotlib")
        return

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = log.with_suffix(".rank0.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(list(losses), list(losses.values()), linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Training loss, resumed runs included")
    axes.grid(alpha=0.3)
    figure.savefig(out / "loss.png", dpi=150)
    print(f"loss curve: {out / 'loss.png'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a store or file for zb_hdf5.Loader")
    parser.add_argument("--out", required=True, help="folder for the checkpoint, the logs and the plot")
    numbers: dict[str, Any] = {
        "steps": 200,
        "global-batch": 32,
        "seed": 1,
        "width": 128,
        "layers": 4,
        "vocab-size": 0,
        "log-every": 20,
        "save-every": 50,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--cache", help="keep what is read in this folder of a local disk")
    parser.add_argument("--document-masks", action="store_true", help="tokens attend to their own document only")
    return parser.parse_args()


def join(backend: str) -> int:
    """Join the other processes of torchrun or srun, if there are any; return this one's number on its host."""
    rank, world_size = resolve_rank()
    job = int(os.environ.get("SLURM_JOB_ID", 0))
    step = int(os.environ.get("SLURM_STEP_ID", 0))
    port = 20_000 + (16 * job + step) % 10_000 if world_size > 1 else 0  # steps on one host must not meet; 0: any
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    os.environ.setdefault("MASTER_PORT", str(port))
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = first_host()
    dist.init_process_group(backend)
    return int(os.environ["LOCAL_RANK"])


def first_host() -> str:
    """Return the host of rank 0."""
    if int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) == 1:
        return "127.0.0.1"
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0]


def main() -> None:
    options = parse()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    local_rank = join("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    run = Run(options, rank, world_size, device)
    run.resume()
    if rank == 0:
        print(f"{world_size} processes, from step {run.step} to {options.steps}, {len(run.loader):,} steps an epoch")
    train(run, options, out / "log")
    if rank == 0:
        plot(out, out / "log")
    run.loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
