"""The whole way from text to a resumed training run, on input that every machine has: `python examples/demo.py`.

The text is the source code of the Python standard library; the tokens are its bytes. Every command that is shown is the
command itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from zb_hdf5 import Loader

BATCH_SIZE: Final = 32
SEQ_LEN: Final = 256
END_OF_DOCUMENT: Final = 256
VOCAB_SIZE: Final = 257
MAX_TEXT_BYTES: Final = 24 << 20
NUM_FILES: Final = 4
WARMUP_BATCHES: Final = 100
MEASURED_BATCHES: Final = 2000
SPARKS: Final = "▁▂▃▄▅▆▇█"


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the data here; by default a temporary folder.")
@click.option("--steps", type=click.IntRange(10, 1000), default=100, show_default=True, help="Training steps.")
def demo(folder: Path | None, steps: int) -> None:
    """Tokenize this machine's Python library, convert, verify, compare, train, stop and resume."""
    start_s = time.monotonic()
    if folder is not None:
        folder.mkdir(parents=True)  # never into a folder that exists: its files belong to the user
        _chapters_inside(folder, steps)
    else:
        with tempfile.TemporaryDirectory(prefix="zb-demo-") as temporary:
            _chapters_inside(Path(temporary), steps)
    _say(f"\nAll of it holds. {time.monotonic() - start_s:.0f} seconds.", bold=True)


def _chapters_inside(folder: Path, steps: int) -> None:
    _say(f"Working in {folder}", dim=True)
    with contextlib.chdir(folder):
        _chapters(steps)


def _chapters(steps: int) -> None:
    tokens = Path("tokens")
    h5 = Path("train-h5")
    batch = Path("train-batch")
    _chapter(1, "Text to tokens: the Python standard library, byte by byte, as .npy files")
    _write_tokens(tokens)
    _chapter(2, "Into HDF5: shuffled records in pre-formed batches, 4 shards")
    shape = ["--batch-size", str(BATCH_SIZE), "--seq-len", str(SEQ_LEN), "--vocab-size", str(VOCAB_SIZE)]
    _command(["convert", "npy-to-hdf5", str(tokens), str(h5), *shape, "--shards", "4"])
    _command(["info", str(h5)])
    _chapter(3, "Verify every batch and shard")
    _command(["verify", str(h5)])
    _chapter(4, "The same batches as a native .batch store")
    _command(["convert", "hdf5-to-batch", str(h5), str(batch)])
    _chapter(5, "One loader, two formats: identical batches in identical order")
    _compare_backends(h5, batch)
    _chapter(6, "Side by side with a plain PyTorch DataLoader over the same tokens")
    _measure(h5, batch, tokens)
    _chapter(7, "Train a small transformer from HDF5, stop, resume, and compare")
    _train_and_resume(h5, steps)


def _write_tokens(folder: Path) -> None:
    """Write the bytes of the standard library's source files as 1-D uint16 streams."""
    folder.mkdir()
    parts: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(NUM_FILES)]
    total = count = 0
    for number, text in enumerate(_documents(Path(sysconfig.get_paths()["stdlib"]))):
        ids = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
        parts[number % NUM_FILES].append(ids)
        total += len(ids)
        count += 1
    for number, part in enumerate(parts):
        np.save(folder / f"part-{number}.npy", np.concatenate(part))
    _say(f"{count:,} files of source code, {total:,} tokens, vocabulary {VOCAB_SIZE}, in {NUM_FILES} .npy files")


def _documents(library: Path) -> Iterator[bytes]:
    total = 0
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and total < MAX_TEXT_BYTES:
            text = path.read_bytes()
            total += len(text)
            yield text


def _compare_backends(h5: Path, batch: Path) -> None:
    loaders = {name: Loader(path, seed=7, rank=0, world_size=1) for name, path in (("hdf5", h5), ("batch", batch))}
    digests = {}
    for name, loader in loaders.items():
        digest = hashlib.sha256()
        for tokens in loader:
            digest.update(tokens.numpy())
        digests[name] = digest.hexdigest()
        _say(f"{name:>6}  {len(loader):,} batches  sha256 of the epoch {digests[name][:32]}…")
    _require(digests["hdf5"] == digests["batch"], "both backends yield the same epoch")
    _require(loaders["hdf5"].batches.fingerprint == loaders["batch"].batches.fingerprint, "and have one fingerprint")


class _Records(torch.utils.data.Dataset[Tensor]):
    """The data set that one writes without a library: record i of a memory-mapped array."""

    def __init__(self, records: np.ndarray[Any, Any]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._records[index].astype(np.int64))


def _measure(h5: Path, batch: Path, tokens: Path) -> None:
    stream = np.load(tokens / "part-0.npy", mmap_mode="r")
    records = stream[: len(stream) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN)
    rows: dict[str, Callable[[], Any]] = {
        "Loader, HDF5": lambda: Loader(h5, rank=0, world_size=1),
        "Loader, .batch": lambda: Loader(batch, rank=0, world_size=1),
        "PyTorch DataLoader": lambda: torch.utils.data.DataLoader(_Records(records), BATCH_SIZE, shuffle=True),
    }
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(5):  # in turn, so that a busy moment of the machine meets all of them
        for name, make in rows.items():
            rates[name].append(_tokens_per_second(make()))
    best = max(max(values) for values in rates.values())
    for name, values in rates.items():
        rate = sorted(values)[2]
        _say(f"{name:>18}  {rate / 1e6:>6.1f} M tok/s  {'█' * max(1, round(40 * rate / best))}")


def _tokens_per_second(batches: Any) -> float:
    """Measure the steady state: the first batches open files and start whatever there is to start."""
    iterator = iter(batches)
    for _ in zip(range(WARMUP_BATCHES), iterator, strict=False):
        pass
    start_s = time.perf_counter()
    count: int = sum(tokens.numel() for _, tokens in zip(range(MEASURED_BATCHES), iterator, strict=False))
    return count / (time.perf_counter() - start_s)


class _Transformer(nn.Module):
    """A decoder of two layers, small enough to learn something in seconds on two cores."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, width)
        self.positions = nn.Embedding(SEQ_LEN, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB_SIZE)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQ_LEN - 1), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of every next token, in nats."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class _Run:
    """A training run that can be stopped: model, optimizer and loader state are its checkpoint."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        self.loader = Loader(path, seed=1, rank=0, world_size=1)
        self.model = _Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.seen: list[str] = []

    def train(self, steps: int) -> None:
        for number, batch in enumerate(self.loader, 1):
            self.seen.append(hashlib.sha256(batch.numpy()).hexdigest())
            loss = self.model(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            if number == steps:
                return

    def save(self, path: Path) -> None:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**parts, "loader": self.loader.state_dict()}, path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.loader.load_state_dict(checkpoint["loader"])


def _train_and_resume(h5: Path, steps: int) -> None:
    after = steps // 4
    before = steps - after
    stopped = _Run(h5)
    stopped.train(before)
    checkpoint = Path("checkpoint.pt")
    stopped.save(checkpoint)
    _say(f"{before} steps, loss {stopped.losses[0]:.2f} → {stopped.losses[-1]:.2f} nats a byte")
    _say(f"stopped; the loader's state: {json.dumps(stopped.loader.state_dict())}")
    resumed = _Run(h5)
    resumed.load(checkpoint)
    resumed.train(after)
    _say(f"resumed, {after} steps more, loss {resumed.losses[-1]:.2f}")
    _say(f"loss  {_sparkline(stopped.losses)}│{_sparkline(resumed.losses, like=stopped.losses)}  (│ stop and resume)")
    loader = Loader(h5, seed=1, rank=0, world_size=1)
    uninterrupted = [hashlib.sha256(batch.numpy()).hexdigest() for _, batch in zip(range(steps), loader, strict=False)]
    _require(stopped.losses[-1] < 0.7 * stopped.losses[0], "the loss goes down")
    _require(
        stopped.seen + resumed.seen == uninterrupted[: before + after],
        f"the {after} batches after the resume are exactly the batches of an uninterrupted run",
    )


def _sparkline(values: list[float], like: list[float] | None = None) -> str:
    """Draw each value as a block of one of eight heights, on the scale of `like`."""
    low = min(like or values)
    high = max(like or values)
    heights = [(value - low) / (high - low or 1.0) for value in values]
    return "".join(SPARKS[round(7 * min(1.0, max(0.0, height)))] for height in heights)


def _command(arguments: list[str]) -> None:
    _say(f"$ {shlex.join(['zb', *arguments])}", dim=True)
    sys.stdout.flush()
    code = subprocess.run([sys.executable, "-m", "zb_hdf5", *arguments], check=False).returncode
    if code:
        sys.exit(code)


def _require(condition: bool, claim: str) -> None:
    if not condition:
        raise click.ClickException(f"the demo failed: this is false: {claim}")
    _say(f"✓ {claim}")


def _chapter(number: int, title: str) -> None:
    _say(f"\n{number}. {title}", bold=True)


def _say(text: str, **style: bool) -> None:
    click.secho(text, **style)  # type: ignore[arg-type]


if __name__ == "__main__":
    demo()
