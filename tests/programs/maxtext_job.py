"""Trains by MaxText and `recipe.py` as one of some processes: maxtext_job.py PROCESS COUNT PORT STEPS ROWS.

It takes steps of ROWS rows up to STEPS, and saves the rows of its batches as PROCESS-of-COUNT.npz.
"""

import sys
from pathlib import Path

import numpy as np

#: A small model, of which up to three processes have equal parts; a process is one device.
ARGUMENTS = """
dataset_type=grain grain_train_files=train-h5 grain_eval_files=train-h5 eval_interval=4 data_shuffle_seed=42
run_name=run checkpoint_period=100 async_checkpointing=false
max_target_length=64 vocab_size=300 base_emb_dim=48 base_mlp_dim=48 head_dim=16 base_num_decoder_layers=1
base_num_query_heads=2 base_num_kv_heads=2 attention=dot_product hardware=cpu skip_jax_distributed_system=true
gcs_metrics=false enable_tensorboard=false
"""


def train_up_to(steps, num_rows, recipe, step, evaluate):
    """Train by the names of a recipe up to a step, and call the functions with the batches of this process."""

    class Noted(recipe["MultiHostDataLoadIterator"]):
        def __next__(self):
            batch = super().__next__()
            see = step if self.dataloader.repeat else evaluate
            see({name: np.concatenate([part.data for part in of.addressable_shards]) for name, of in batch.items()})
            return batch

    recipe["MultiHostDataLoadIterator"] = Noted
    sizes = [f"steps={steps}", f"per_device_batch_size={num_rows}", f"base_output_directory={Path.cwd()}"]
    recipe["train"].main(["maxtext", *ARGUMENTS.split(), *sizes])


def main():
    import jax

    process, count, port, steps, num_rows = map(int, sys.argv[1:])
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    recipe = {"__name__": "recipe"}
    exec(Path("recipe.py").read_text(), recipe)
    batches = []
    train_up_to(steps, num_rows, recipe, batches.append, lambda batch: None)
    arrays = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    np.savez(f"{process}-of-{count}.npz", **arrays)


if __name__ == "__main__":
    main()
