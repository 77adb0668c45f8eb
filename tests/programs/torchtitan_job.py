"""Trains with the parts of torchtitan and `recipe.py` as one of some processes: PROCESS COUNT PORT STEPS.

It goes on from the newest checkpoint, takes steps of two rows up to STEPS, or to the end of the epoch (0), and saves
the rows of its batches as PROCESS-of-COUNT.npz. torchtitan's `CheckpointManager` saves its states after every 20 steps.
"""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

#: The sizes that torchtitan's trainer gives to a loader.
SIZES = {"max_context_length": 64, "num_tokens_per_batch": 128, "tokenizer": None}


class Progress:
    """The state of a trainer that a checkpoint has."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


def manager_of(dataloader, progress):
    """Return the manager of the checkpoints of a small model, as torchtitan's trainer makes it."""
    parts = [torch.nn.Linear(2, 2)]
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(model_parts=parts)
    rates = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=100)
    states = {"optimizers": optimizers, "lr_schedulers": rates, "states": {"train_state": progress}}
    config = CheckpointManager.Config(enable=True, interval=20)
    return config.build(dataloader=dataloader, model_parts=parts, sd_adapter=None, base_folder="run", **states)


def main():
    process, count, port, steps = map(int, sys.argv[1:])
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=process, world_size=count)
    sys.modules["recipe"] = ModuleType("recipe")  # a dataclass looks for the module of its class
    recipe = {"__name__": "recipe"}
    exec(Path("recipe.py").read_text(), recipe)
    config = recipe["StoredTokens"].Config(path="train-h5", repeat=False)
    dataloader = config.build(dp_rank=process, dp_world_size=count, **SIZES)
    progress = Progress()
    manager = manager_of(dataloader, progress)
    manager.load()
    batches = []
    for inputs, labels in dataloader:
        progress.step += 1
        batches.append({**inputs, "labels": labels})
        manager.save(progress.step)
        if progress.step == steps:
            break
    else:  # a job that goes on from there has nothing more
        ended = config.build(dp_rank=process, dp_world_size=count, **SIZES)
        ended.load_state_dict(dataloader.state_dict())
        assert not list(ended)
        ended.close()
    manager.close()
    dataloader.close()
    rows = {name: np.stack([batch[name].view(2, 64).numpy() for batch in batches]) for name in batches[0]}
    np.savez(f"{process}-of-{count}.npz", **rows)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
