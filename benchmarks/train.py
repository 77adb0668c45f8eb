"""A small model that is trained from each source of batches: the share of its time that it waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of each process would import it, for seconds
from torch import nn

from benchmarks import measure as m
from benchmarks.peers import file_of, prepare

TITLES = ("A small model, end to end",)
NOTES = {
    TITLES[0]: (
        "A transformer of two layers of width 64 is trained on batches of 32 x 512 tokens, in one process. "
        "`waiting` is the share of the time in which it has no batch. Ids are taken modulo 1,024."
    )
}
#: MiB of the tokens of a source.
MIB = 200
STEPS = 12
QUICK_STEPS = 1
#: The records of a batch that a quick step is trained on: the model takes nearly all of its time.
QUICK_RECORDS = 2
STEP = "step, ms"
#: The ids are taken modulo this: the model is small, and so is its last layer.
VOCAB_SIZE = 1024
WIDTH = 64
#: Row -> the file of `benchmarks/peers` that has it.
ROWS = {
    "Loader": "ours",
    "Loader, .batch": "ours",
    "h5py in a DataLoader": "plain_h5py",
    "np.memmap in a DataLoader": "memmap",
    "np.memmap loop": "memmap",
}
BASELINE = "np.memmap loop"


class Model(nn.Module):
    """A decoder-only transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(m.SEQ_LEN - 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each next token."""
        hidden = self.blocks(self.tokens(ids[:, :-1]), mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


def train(folder: str, name: str, steps: int, records: int) -> m.Figures:
    """Train from the second pass over a source, and return the milliseconds of a step and the share of waiting.

    Parameters
    ----------
    steps
        The steps that are timed.
    records
        The records of each batch that the model takes.
    """
    epochs = file_of(ROWS[name]).BATCHES[name](Path(folder))
    seen = m.tokens_seen(epochs(0))
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    waited_s = 0.0
    batches = iter(epochs(1))
    for step in range(steps + 1):
        if step == 1:  # the first step allocates
            start_s = time.perf_counter()
            waited_s = 0.0
        asked_s = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked_s
        loss = model(batch[:records] % VOCAB_SIZE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    elapsed_s = time.perf_counter() - start_s
    return {STEP: 1e3 * elapsed_s / steps, m.WAITING: 100 * waited_s / elapsed_s, m.SEEN: seen}


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the one table."""
    folder = run.folder
    build = run.builds[0]
    m.write_tokens(folder / "tokens.npy", run.batches * m.BATCH_SIZE)
    for name in dict.fromkeys(ROWS.values()):
        prepare(name, str(folder))
    size = (QUICK_STEPS, QUICK_RECORDS) if run.quick else (STEPS, m.BATCH_SIZE)
    ways = [m.Way(name, m.way_of(build, "train", str(folder), name, *size), BASELINE) for name in ROWS]
    yield m.compare(run.titles[0], ways, run.rounds)
