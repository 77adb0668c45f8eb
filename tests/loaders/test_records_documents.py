"""Documents and fields in the libraries of Hugging Face: `Loader.records()`, and files that `datasets` opens."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream

from zb_hdf5 import HDF5ShardWriter, Loader, convert

LENGTHS = [5, 9, 1, 20, 13, 2, 7, 30, 11, 4, 16, 10]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loss_of_a_trainer_is_that_of_each_document_alone(tmp_path):
    """A model of transformers makes its masks from `position_ids`, where no `attention_mask` and no cache is."""
    transformers = pytest.importorskip("transformers")
    tokens = np.random.default_rng(5).integers(0, 50, sum(LENGTHS))
    write_stream(tmp_path / "s.h5", tokens, LENGTHS, vocab_size=50)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with Loader(tmp_path / "s.h5", batch_size=4, seq_len=32, documents=True, rank=0, world_size=1) as loader:
        records = loader.records()
        assert {name: values.dtype for name, values in records[0].items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), torch.int64
        )
        total, count = 0.0, 0
        for record in records:
            starts = torch.where(record["position_ids"] == 0)[0]
            for part in torch.tensor_split(record["input_ids"], starts[1:]):
                if len(part) > 1:
                    loss = model(input_ids=part[None], labels=part[None]).loss
                    total, count = total + loss.item() * (len(part) - 1), count + len(part) - 1
        found = transformers.Trainer(model, options, train_dataset=records).train().training_loss
    assert len(records) == 4
    assert found == pytest.approx(total / count, rel=1e-5)


@pytest.fixture
def shard(tmp_path):
    """Three batches with fields."""
    tokens = np.arange(24).reshape(3, 2, 4)
    fields = {"loss_mask": "u1", "concept": ("f4", (2,))}
    values = {"loss_mask": tokens % 2, "concept": np.stack([tokens, -tokens], axis=-1)}
    write_batches(tmp_path / "a.h5", tokens, values, dtype="uint16", fields=fields)
    return tmp_path / "a.h5"


def test_datasets_opens_a_shard(shard, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset("hdf5", data_files=str(shard), split="train", cache_dir=str(tmp_path / "cache"))
    assert found[1]["batches"] == np.arange(8, 16).reshape(2, 4).tolist()
    assert found[1]["fields"]["loss_mask"] == [[0, 1, 0, 1], [0, 1, 0, 1]]
    assert len(found) == 3


def test_datasets_opens_a_store_by_the_documented_pattern(shard, tmp_path):
    datasets = pytest.importorskip("datasets")
    with HDF5ShardWriter(tmp_path / "s.h5") as writer:
        for length in (9, 3, 20):
            writer.write_document(np.arange(length))
    convert(tmp_path / "s.h5", "hdf5", tmp_path / "train-h5", batch_size=1, seq_len=4, num_shards=2)
    page = (Path(__file__).parents[2] / "docs/train.md").read_text()
    pattern = re.search(r'data_files="train-h5/(.+?)"', page)[1]
    files = str(tmp_path / "train-h5" / pattern)
    found = datasets.load_dataset("hdf5", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(found) == 8
    assert set(found.column_names) == {"batches", "crc32"}
