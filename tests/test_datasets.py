"""The store inside other people's loops: DataLoader, StatefulDataLoader, transformers' Trainer, Lightning."""

import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from zb_hdf5 import BatchIndexError, Loader, open_writer

VOCAB_SIZE = 50
TOKENS = np.random.default_rng(7).integers(0, VOCAB_SIZE, (24, 4, 16), dtype=np.uint16)


@pytest.fixture
def loader(tmp_path):
    with open_writer(tmp_path / "t.h5", batch_size=4, seq_len=16, dtype="uint16") as writer:
        writer.write(TOKENS)
    loader = Loader(tmp_path / "t.h5", rank=1, world_size=2)
    yield loader
    loader.close()


def test_items_are_the_steps_of_this_rank(loader):
    dataset, steps = loader.dataset(), list(loader)
    assert len(dataset) == len(steps) == 12
    assert all(torch.equal(dataset[i], steps[i]) for i in range(12))
    assert torch.equal(dataset[-1], steps[-1])
    assert all(torch.equal(a, steps[i]) for a, i in zip(dataset.__getitems__([3, 0, 7]), [3, 0, 7], strict=True))
    for index in (12, -13):
        with pytest.raises(BatchIndexError):
            dataset[index]
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[5], steps[5])
    dataset.set_epoch(1)
    assert not torch.equal(dataset[0], steps[0])


class CountedOrder:
    """An order that keeps count of what it is asked."""

    def __init__(self, order):
        self.order, self.n, self.calls, self.positions = order, order.n, 0, 0

    def indices(self, positions):
        self.calls, self.positions = self.calls + 1, self.positions + positions.size
        return self.order.indices(positions)


@pytest.mark.parametrize("stride", [1, 2, 3, 8])  # the steps that one of so many workers is asked for
@pytest.mark.parametrize(("shuffle", "per_step"), [("global", 1), ("records", 4)])
def test_the_order_of_single_steps_is_computed_in_blocks(shuffle, per_step, stride, tmp_path):
    with open_writer(tmp_path / "t.h5", batch_size=4, seq_len=2, dtype="uint16") as writer:
        writer.write(np.arange(3000 * 8, dtype=np.uint16).reshape(3000, 4, 2))
    with Loader(tmp_path / "t.h5", shuffle=shuffle, rank=0, world_size=1) as loader:
        expected, dataset = list(loader), loader.dataset()
        counted = loader._order = CountedOrder(loader._order)
        for step in range(0, 3000, stride):
            assert torch.equal(dataset[step], expected[step])
        assert counted.calls <= 12
        assert counted.positions <= 3 * 3000 // stride * per_step + 3000 * per_step * (stride == 2)


def test_the_order_of_steps_in_random_order_is_computed_for_no_others(tmp_path):
    with open_writer(tmp_path / "t.h5", batch_size=4, seq_len=2, dtype="uint16") as writer:
        writer.write(np.arange(3000 * 8, dtype=np.uint16).reshape(3000, 4, 2))
    with Loader(tmp_path / "t.h5", rank=0, world_size=1) as loader:
        expected, dataset = list(loader), loader.dataset()
        counted = loader._order = CountedOrder(loader._order)
        for step in np.random.default_rng(3).permutation(3000).tolist():
            assert torch.equal(dataset[step], expected[step])
        assert counted.positions <= 3 * 3000


def test_single_steps_follow_the_epoch_and_the_batch_size(loader):
    dataset = loader.dataset()
    first = [dataset[i] for i in range(4)]
    dataset.set_epoch(1)
    assert all(torch.equal(dataset[i], step) for i, step in zip(range(4), loader, strict=False))
    assert not torch.equal(dataset[0], first[0])
    loader.set_batch_size(2)
    assert [dataset[i].shape for i in range(3)] == [(2, 16)] * 3
    assert all(torch.equal(dataset[i], step) for i, step in zip(range(4), loader, strict=False))


@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_torch_dataloader_with_every_start_method(loader, method):
    workers = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
    found = list(DataLoader(loader.dataset(), batch_size=None, **workers))
    assert all(torch.equal(a, b) for a, b in zip(found, loader, strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stateful_dataloader_resumes(loader):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    source = stateful(loader.dataset(), batch_size=None, num_workers=0)
    iterator = iter(source)
    for _ in range(5):
        next(iterator)
    state = source.state_dict()
    resumed = stateful(loader.dataset(), batch_size=None, num_workers=0)
    resumed.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(resumed, list(loader)[5:], strict=True))


def test_records_are_what_trainers_expect(loader):
    records = loader.records()
    assert len(records) == 96
    for index in (0, 50, 95, -1):
        item = records[index]
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == TOKENS.reshape(-1, 16)[index].tolist()
        assert torch.equal(item["input_ids"], item["labels"])
        assert item["input_ids"].data_ptr() != item["labels"].data_ptr()
    batch = next(iter(DataLoader(records, batch_size=8)))
    assert batch["input_ids"].shape == (8, 16)


@pytest.mark.filterwarnings("ignore")  # torch leaves a file of its checkpoint to the garbage collector
def test_loader_state_inside_torch_save_and_distributed_checkpoint(loader, tmp_path):
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    torch.save({"loader": state}, tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt", weights_only=True)["loader"] == state == json.loads(json.dumps(state))
    assert len(json.dumps(state)) < 1024
    import torch.distributed.checkpoint as dcp

    dcp.save({"loader": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    restored = {"loader": loader.state_dict() | {"position": 0}}
    dcp.load(restored, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert restored["loader"] == state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_trains_on_records(loader, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), options, train_dataset=loader.records())
    result = trainer.train()
    assert result.global_step == 4
    assert 0 < result.training_loss < 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_batches_and_on_the_loader_itself(loader, tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins.environments import LightningEnvironment

    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)

        def training_step(self, batch, index):
            seen.append(batch.clone())
            return torch.nn.functional.cross_entropy(
                self.embedding(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            )

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for source in (DataLoader(loader.dataset(), batch_size=None), loader):
        seen.clear()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        alone = [LightningEnvironment()]  # else it asks mpi4py, which opens what it never closes
        lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, plugins=alone, **quiet).fit(Model(), source)
        assert all(torch.equal(a, b) for a, b in zip(seen, loader, strict=True))
