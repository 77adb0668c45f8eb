"""From a folder of text to a trained model: tokenizer, store, check, training, and validation bits per byte.

    python examples/pretrain_books.py corpus/ --out run --steps 300
    python examples/pretrain_books.py corpus/ --out run --steps 600    # from 300 on

`corpus/` holds Parquet, JSON lines or plain text. Each command is shown before it runs, as one would type it; what is
there already is not made again. The folder `--out` gets `tok.json`, `store`, `checkpoint.pt`, `result.json` and
`bpb.png`. The tokenizer learns from all files; the model never sees those that are held out. Needs
`pip install 'zb_hdf5[torch,text]' matplotlib`.

Bits per byte, unlike the loss per token, can be compared between tokenizers: the bits that the model needs for the
tokens of the held-out text, over the bytes that they stand for. The boundary token costs bits and stands for no byte.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from train_gpt import Run

from zb_hdf5 import Loader, ZbError, resolve_rank

#: The files of each kind of documents that `zb convert` reads.
SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), "text": (".txt",)}
BATCH_SIZE, SEQ_LEN = 16, 257  # 256 tokens and, shifted by one, their 256 targets
FEW_TEXTS = 20  # of so many plain text files, drawing one in ten might hold out none
UNIGRAM_BATCHES = 500


def zb(*arguments: str) -> None:
    """Show a command and run it; if it fails, it has said why: end with its exit code."""
    print(f"\n$ {shlex.join(['zb', *arguments])}", flush=True)
    done = subprocess.run([Path(sys.executable).with_name("zb"), *arguments])
    if done.returncode:
        raise SystemExit(done.returncode)


def find_documents(folder: Path) -> tuple[str, int]:
    """Return the kind of the documents in a folder, the first that it has of all kinds, and the number of files."""
    paths = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
    for kind, suffixes in SUFFIXES.items():
        if num_files := sum(path.name.endswith(suffixes) for path in paths):
            return kind, num_files
    raise SystemExit(f"{folder}: expected .parquet, .jsonl or .txt files, found none")


def prepare(books: Path, out: Path, options: argparse.Namespace) -> None:
    """Make the tokenizer and the store, if they are not there, and check the store."""
    kind, num_files = find_documents(books)
    column = ["--text-column", options.text_column] if options.text_column != "text" else []
    tokenizer = out / "tok.json"
    store = out / "store"
    if not tokenizer.exists():
        zb("tokenizer", "train", str(books), "--vocab-size", str(options.vocab_size), "-o", str(tokenizer), *column)
    if not store.exists():
        last = num_files > 1 and (kind != "text" or num_files < FEW_TEXTS)
        held_out = ["--val-last-shard"] if last else ["--val-fraction", "0.1"]
        # rows of padding would count as text that is easy to predict
        shape = ["--seq-len", str(SEQ_LEN), "--batch-size", str(BATCH_SIZE), "--remainder", "drop"]
        column = column if kind != "text" else []
        options_of_text = ["--tokenizer", f"hf:{tokenizer}", *held_out, *column]
        zb("convert", f"{kind}-to-hdf5", str(books), str(store), *options_of_text, *shape, "--resume")
    zb("verify", str(store))


class Validation:
    """The first `num_batches` batches of the held-out text, always the same ones, and the bytes of their targets."""

    def __init__(self, store: Path, tokenizer: Path, num_batches: int) -> None:
        with Loader(store, split="val", shuffle="sequential", rank=0, world_size=1, targets=True) as loader:
            self.batches: list[tuple[Tensor, Tensor]] = list(islice(loader, num_batches))
        content = json.loads(tokenizer.read_text(encoding="utf-8"))
        length = {number: len(token) for token, number in content["model"]["vocab"].items()}  # a character for a byte
        length |= {token["id"]: 0 for token in content["added_tokens"]}
        self._bytes_of_token = torch.tensor([length[number] for number in range(len(length))])
        self.num_bytes = sum(int(self._bytes_of_token[y].sum()) for _, y in self.batches)
        self.num_tokens = sum(y.numel() for _, y in self.batches)

    def nats(self, model: nn.Module, device: torch.device) -> float:
        """Return the cross-entropy of all targets together."""
        with torch.inference_mode():
            return sum(model(x.to(device), y.to(device)).item() * y.numel() for x, y in self.batches)

    def unigram_nats(self, store: Path) -> float:
        """The same for a model that has only the frequency of each token of the training split."""
        counts = np.ones(len(self._bytes_of_token))  # one more than seen: no token is impossible
        with Loader(store, rank=0, world_size=1) as loader:
            for tokens in islice(loader, UNIGRAM_BATCHES):
                counts += np.bincount(tokens.flatten().numpy(), minlength=len(counts))
        nats = -np.log(counts / counts.sum())
        return sum(float(nats[y.numpy()].sum()) for _, y in self.batches)

    def bits_per_byte(self, nats: float) -> float:
        return nats / math.log(2) / self.num_bytes


def train(run: Run, validation: Validation, result: dict[str, Any], options: argparse.Namespace) -> None:
    """Train up to `--steps`; evaluate, save and print a line at the start, each `--eval-every` steps and at the end."""
    device = next(run.model.parameters()).device
    before = run.loader.stats()
    evaluated = run.step if run.step else -1
    print(f"\n{'step':>6} {'tokens seen':>12} {'val bits/byte':>14} {'tokens/s':>9} {'waited for data':>16}")
    while True:
        due = run.step % options.eval_every == 0 or run.step >= options.steps
        if due and run.step != evaluated:
            stats = run.loader.stats().since(before)
            tokens = BATCH_SIZE * (SEQ_LEN - 1)
            nats = validation.nats(run.model, device)
            row = {"step": run.step, "tokens": run.step * tokens, "val_nats": nats}
            row |= {"val_bpb": validation.bits_per_byte(nats), "seconds": stats.elapsed_s, "waited_s": stats.waited_s}
            result["evaluations"].append(row)
            save(result, Path(options.out))  # before the checkpoint, which decides from which step on to resume
            run.save()
            speed = ""
            if stats.batches:
                rate = (run.step - evaluated) * tokens / stats.elapsed_s
                speed = f"{rate:9,.0f} {stats.waited_share:16.2%}"
            print(f"{run.step:6,} {row['tokens']:12,} {row['val_bpb']:14.3f} {speed}", flush=True)
            evaluated = run.step
            before = run.loader.stats()  # without the time of the evaluation
        if run.step >= options.steps:
            return
        x, y = run.loader.get_batch()
        run.optimizer.zero_grad()
        loss = run.model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.step += 1


def begin(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the results so far of a folder, which must have the same settings."""
    path = out / "result.json"
    result = {"settings": settings, "evaluations": []}
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if (found := result["settings"][name]) != value:
                raise SystemExit(f"{out}: was made with {name} {found!r}, not {value!r}; pass another --out")
    save(result, out)
    return result


def save(result: dict[str, Any], out: Path) -> None:
    partial = out / "result.json.partial"
    partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    os.replace(partial, out / "result.json")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the bits per byte over the tokens seen, and the bits of the unigram model."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no curve is drawn: pip install matplotlib")
        return

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = result["evaluations"]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([row["tokens"] / 1e6 for row in rows], [row["val_bpb"] for row in rows], marker="o", label="model")
    axes.axhline(result["unigram_bpb"], color="gray", linestyle="--", label="frequencies of tokens (unigram)")
    axes.set(
        xlabel="million tokens seen", ylabel="validation bits per byte", title="Held-out text, resumed runs included"
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"\n{path}: the curve")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="books", type=Path, help="folder or file of documents")
    parser.add_argument("--out", required=True, type=Path, help="folder for all that is made")
    parser.add_argument("--text-column", default="text", help="column, or JSON key, that holds the text")
    numbers = {
        "steps": 300,
        "vocab-size": 4096,
        "width": 128,
        "layers": 4,
        "seed": 1,
        "eval-every": 50,
        "eval-batches": 20,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[default: {default}]")
    parser.add_argument("--lr", type=float, default=1e-3, help="[default: 0.001]")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if resolve_rank() != (0, 1):
        raise SystemExit("this example is one process: start it without srun and torchrun, or with one task")
    books = options.data
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    same = ("text_column", "vocab_size", "width", "layers", "seed", "eval_batches", "lr")
    result = begin(out, {"data": str(books.resolve()), **{name: getattr(options, name) for name in same}})
    prepare(books, out, options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {
        **vars(options),
        "data": out / "store",
        "global_batch": BATCH_SIZE,
        "vocab_size": 0,  # the store has its own
        "document_masks": False,
        "cache": None,
    }
    run = Run(argparse.Namespace(**settings), 0, 1, device)
    run.resume()
    result["evaluations"] = [row for row in result["evaluations"] if row["step"] <= run.step]
    validation = Validation(out / "store", out / "tok.json", options.eval_batches)
    result["val_tokens"], result["val_bytes"] = validation.num_tokens, validation.num_bytes
    result["parameters"] = sum(each.numel() for each in run.model.parameters())
    result["unigram_bpb"] = validation.bits_per_byte(validation.unigram_nats(out / "store"))
    print(
        f"\n{result['parameters']:,} parameters, from step {run.step} to {options.steps}, {len(run.loader):,} steps an "
        f"epoch; validation on {validation.num_bytes:,} bytes, unigram: {result['unigram_bpb']:.3f} bits per byte"
    )
    train(run, validation, result, options)
    run.loader.close()
    plot(result, out / "bpb.png")
    print(f"{out / 'result.json'}: the figures")


if __name__ == "__main__":
    try:
        main()
    except ZbError as error:
        raise SystemExit(f"Error: {error}") from None
