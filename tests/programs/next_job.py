"""Runs `recipe.py` and `use.py` twice, each time in an empty namespace, and notes each row that is seen in `seen.txt`.

Only what a reader brings is given: a model, its optimizer, a causal model with its tokenizer, and functions for a step.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.modules["mpi4py"] = None  # no recipe is to look for an MPI
FOLDER = Path.cwd()


def note(kind, rows):
    """Add the beginning of each row to the file, also from another process; rows of padding are all 0."""
    with open(FOLDER / "seen.txt", "a") as file:
        for row in rows.tolist():
            if any(row):
                file.write(f"{kind} {' '.join(map(str, row[:40]))}\n")


def tokens_in(batch):
    """Return the tokens of a batch as any recipe gives it."""
    if isinstance(batch, dict):
        batch = batch.get("inputs", batch.get("tokens"))
    return torch.as_tensor(batch)


class Seen(torch.nn.Sequential):
    """A model that notes its inputs: those of training have gradients."""

    def forward(self, tokens):
        note("train" if torch.is_grad_enabled() else "held-out", tokens)
        return super().forward(tokens)


def given():
    """Return what a recipe finds."""
    torch.manual_seed(1)
    model = Seen(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "step": lambda batch: note("train", tokens_in(batch)),
        "evaluate": lambda batch: note("held-out", tokens_in(batch)),
    }
    text = Path("recipe.py").read_text()
    if "causal_lm" in text:
        names["causal_lm"] = causal_lm()
    if "=tokenizer" in text:
        names["tokenizer"] = tokenizer()
    return {name: value for name, value in names.items() if name in text or name in ("step", "evaluate")}


def causal_lm():
    from transformers import GPT2Config, GPT2LMHeadModel

    def noted(module, positional, named):
        note("train" if torch.is_grad_enabled() else "held-out", named["input_ids"])

    sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.register_forward_pre_hook(noted, with_kwargs=True)  # the Trainer looks at the arguments of `forward`
    return model


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(300)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")


def wait_for_threads_of_gloo():
    """Wait until no thread of gloo is at work.

    After a collective such a thread takes the interpreter lock to let go of the tensors. PyTorch 2.13 aborts the
    process if the interpreter ends before that, and the threads outlive their group where a model of DDP was made.
    """
    is_at_work = True
    while is_at_work:
        time.sleep(0.1)  # without the lock, which a thread that waits for it can take
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
        is_at_work = any("gloo" in thread and ") R " in thread for thread in threads)


# a launcher of several ranks starts one job in each of two calls: JOB is its number
for job in [int(os.environ["JOB"])] if "JOB" in os.environ else range(2):
    names = given()
    # a trainer with a number of steps of its own takes four more
    recipe = Path("recipe.py").read_text().replace("max_steps=4", f"max_steps={4 * (job + 1)}")
    space = {"__name__": "__main__", **names}
    exec(compile(recipe, "recipe.py", "exec"), space)
    exec(
        compile(Path("use.py").read_text(), "use.py", "exec"), {"json": json, "Path": Path, "replace": replace} | space
    )
if torch.distributed.is_initialized():  # some recipes leave it: the group of their framework lives on
    torch.distributed.destroy_process_group()
if torch.distributed.is_available():
    wait_for_threads_of_gloo()
if "ray" in sys.modules:
    sys.modules["ray"].shutdown()
