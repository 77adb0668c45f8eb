"""The store inside other people's libraries: DataLoader, StatefulDataLoader, Trainer, Lightning, datasets."""

import gc
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from torch.utils.data import DataLoader

from zb_hdf5 import BatchIndexError, Loader, StateError, convert

VOCAB_SIZE = 50
TOKENS = np.random.default_rng(7).integers(0, VOCAB_SIZE, (24, 4, 16), dtype=np.uint16)


@pytest.fixture
def loader(tmp_path):
    write_batches(tmp_path / "t.h5", TOKENS, dtype="uint16")
    loader = Loader(tmp_path / "t.h5", rank=1, world_size=2)
    yield loader
    loader.close()


def test_items_are_the_steps_of_this_rank(loader):
    dataset, steps = loader.dataset(), list(loader)
    assert len(dataset) == len(steps) == 12
    assert all(torch.equal(dataset[i], steps[i]) for i in range(12))
    assert torch.equal(dataset[-1], steps[-1])
    with pytest.warns(UserWarning, match="stacks 3 of them; pass batch_size=None"):
        found = dataset.__getitems__([3, 0, 7])
    assert all(torch.equal(a, steps[i]) for a, i in zip(found, [3, 0, 7], strict=True))
    for index in (12, -13):
        with pytest.raises(BatchIndexError):
            dataset[index]
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[5], steps[5])
    dataset.set_epoch(1)
    assert all(torch.equal(dataset[i], step) for i, step in zip(range(4), loader, strict=False))
    assert not torch.equal(dataset[0], steps[0])
    loader.set_batch_size(2)
    assert [dataset[i].shape for i in range(3)] == [(2, 16)] * 3
    assert all(torch.equal(dataset[i], step) for i, step in zip(range(4), loader, strict=False))


@pytest.mark.parametrize("shuffle", ["global", "records", "block", "sequential"])
@pytest.mark.parametrize("options", [{}, {"skip": [(0, 10, 30)]}, {"drop_last": False}])
@pytest.mark.thin
def test_single_steps_of_a_long_epoch(shuffle, options, tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.loaders.datasets.TABLE_POSITIONS", 100)
    write_batches(tmp_path / "t.h5", np.arange(301 * 8, dtype=np.uint16).reshape(301, 4, 2), dtype="uint16")
    with Loader(tmp_path / "t.h5", shuffle=shuffle, rank=1, world_size=2, **options) as loader:
        expected, dataset = list(loader), loader.dataset()
        for step in np.random.default_rng(3).permutation(len(dataset)).tolist():
            assert torch.equal(dataset[step], expected[step])


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.thin
def test_torch_dataloader_with_every_start_method(loader, method):
    workers = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
    found = list(DataLoader(loader.dataset(), batch_size=None, **workers))
    assert all(torch.equal(a, b) for a, b in zip(found, loader, strict=True))


def epochs_of(loader, count):
    """Return the batches of the first epochs, each in its own order."""
    found = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        found += list(loader)
    assert not torch.equal(found[0], found[len(loader)])
    return found


def assert_same(found, expected):
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_are_kept_alive_hear_of_the_epoch(loader, method):
    expected = epochs_of(loader, 4)
    loader.set_epoch(0)
    dataset, options = loader.dataset(), {"num_workers": 2, "persistent_workers": True}
    source = DataLoader(dataset, batch_size=None, multiprocessing_context=method, **options)
    found = list(source)
    loader.set_epoch(1)
    found += list(source)
    dataset.set_epoch(2)
    found += list(source)
    loader.load_state_dict(loader.state_dict() | {"epoch": 3})
    found += list(source)
    source._iterator = None  # ends the workers, and their pipes, now
    gc.collect()
    assert_same(found, expected)


def test_a_dataloader_that_stacks_batches_is_warned_of_once(loader, recwarn):
    dataset = loader.dataset()
    for _ in range(2):
        assert [batch.shape for batch in DataLoader(dataset, batch_size=4)] == [(4, 4, 16)] * 3
    assert ["stacks 4 of them; pass batch_size=None" in str(warning.message) for warning in recwarn] == [True]


@pytest.mark.slow
def test_workers_that_stack_batches_warn_once(loader):
    code = (
        "import sys; from torch.utils.data import DataLoader; from zb_hdf5 import Loader\n"
        "with Loader(sys.argv[1], rank=0, world_size=1) as loader:\n"
        "    source = DataLoader(loader.dataset(), batch_size=4, num_workers=2)\n"
        "    print(len(list(source) + list(source)))"
    )
    command = [sys.executable, "-c", code, str(loader.batches.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr.count("stacks 4 of them; pass batch_size=None")) == ("12\n", 1)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_sampler_tells_the_epoch_to_every_worker(loader, workers):
    dataset = loader.dataset()
    expected = epochs_of(loader, 3)
    loader.set_epoch(0)
    source = DataLoader(dataset, batch_size=None, sampler=dataset.sampler, multiprocessing_context=None, **workers)
    found = list(source)
    for epoch in (1, 2):
        source.sampler.set_epoch(epoch)
        assert len(source) == 12
        found += list(source)
    assert_same(found, expected)


@pytest.fixture
def stateful():
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("with_sampler", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.thin
def test_stateful_dataloader_resumes_in_the_second_epoch(loader, stateful, workers, with_sampler, chosen):
    def source_of(dataset):
        sampler = dataset.sampler if with_sampler else None
        return stateful(dataset, batch_size=None, num_workers=workers, sampler=sampler)

    expected = epochs_of(loader, 3)
    loader.set_epoch(0)
    dataset = loader.dataset()
    source = source_of(dataset)
    assert_same(source, expected[:12])
    dataset.set_epoch(1)
    iterator = iter(source)
    assert_same([next(iterator) for _ in range(5)], expected[12:17])
    state = source.state_dict()
    del iterator, source
    with Loader(loader.batches.path, rank=1, world_size=2) as other:
        dataset = other.dataset()
        source = source_of(dataset)
        source.load_state_dict(state)
        if chosen:  # as a training loop does at the top of an epoch
            dataset.set_epoch(1)
        assert_same(source, expected[17:24])
        dataset.set_epoch(2)
        assert_same(source, expected[24:])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stateful_dataloader_refuses_the_state_of_another_order(loader, stateful):
    source = stateful(loader.dataset(), batch_size=None)
    next(iter(source))
    state = source.state_dict()
    for options, field in (({"seed": 7}, "seed"), ({"batch_size": 2}, "batch_size"), ({"world_size": 3}, "world_size")):
        with Loader(loader.batches.path, **{"rank": 1, "world_size": 2, **options}) as other:
            resumed = stateful(other.dataset(), batch_size=None)
            resumed.load_state_dict(state)
            with pytest.raises(StateError, match=f"state has {field}"):
                next(iter(resumed))
            last = {**loader.dataset().sampler.state_dict(), "step": len(loader)}  # the other has fewer steps, perhaps
            with pytest.raises(StateError, match=f"state has {field}"):
                other.dataset().sampler.load_state_dict(last)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loader_is_no_map_style_dataset_and_says_what_is(loader, stateful):
    for kind in (stateful, DataLoader):
        with pytest.raises(TypeError, match=r"take loader.dataset\(\) with batch_size=None"):
            next(iter(kind(loader, batch_size=None)))


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


def trainer_options(folder, **options):
    transformers = pytest.importorskip("transformers")
    how = {"output_dir": str(folder / "out"), "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return transformers.TrainingArguments(**how, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_resumes_exactly_in_its_second_epoch(loader, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    options = trainer_options(tmp_path, num_train_epochs=3, per_device_train_batch_size=8, save_steps=17)

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, options, state, control, **_):
            control.should_training_stop = state.global_step == 17

    def train(callbacks, **resume):
        seen = []

        class Trainer(transformers.Trainer):
            def training_step(self, model, inputs, *rest):
                seen.append(inputs["input_ids"].clone())
                return super().training_step(model, inputs, *rest)

        trainer = Trainer(
            transformers.GPT2LMHeadModel(config), options, train_dataset=loader.records(), callbacks=callbacks
        )
        assert 0 < trainer.train(**resume).training_loss < 10
        return seen

    whole = train([])
    assert len(whole) == 36
    assert not torch.equal(whole[0], whole[12])
    stopped = train([Stop()])
    assert len(stopped) == 17
    resumed = train([], resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-17"))
    assert_same(stopped + resumed, whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_accelerate_keeps_the_state_of_a_loader_and_tells_datasets_the_epoch(loader, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = epochs_of(loader, 2)
    loader.set_epoch(0)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(loader.dataset(), batch_size=None))
    assert_same([*prepared, *prepared], expected)
    with Loader(loader.batches.path, rank=1, world_size=2) as first:
        first.set_epoch(1)
        accelerator.register_for_checkpointing(first)
        iterator = iter(accelerator.prepare(first))
        assert_same([next(iterator) for _ in range(5)], expected[12:17])
        accelerator.save_state(str(tmp_path / "state"))
        iterator.close()
    accelerator = accelerate.Accelerator(cpu=True)
    with Loader(loader.batches.path, rank=1, world_size=2) as second:
        accelerator.register_for_checkpointing(second)
        accelerator.load_state(str(tmp_path / "state"))
        assert second.epoch == 1
        assert_same(accelerator.prepare(second), expected[17:])
    accelerate.state.AcceleratorState._reset_state(True)  # else the next Trainer finds it


def lightning_fit(source, folder, seen, **options):
    """Train with Lightning on `source`; `seen` gets a copy of every batch."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)

        def training_step(self, batch, index):
            seen.append(batch.clone())
            return torch.nn.functional.cross_entropy(
                self.embedding(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            )

        def validation_step(self, batch, index):
            validated.append(batch.clone())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    validated = options.pop("validated", [])
    validation = options.pop("validation", None)
    checkpoint = options.pop("ckpt_path", None)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=options.get("max_steps", 0) or 12)
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "callbacks": [saving]}
    alone = [LightningEnvironment()]  # else it asks mpi4py, which opens what it never closes
    trainer = lightning.Trainer(default_root_dir=folder, plugins=alone, **quiet, **options)
    trainer.fit(Model(), source, validation, ckpt_path=checkpoint, weights_only=False)
    return saving.best_model_path


def with_the_sampler(loader, kind=DataLoader):
    dataset = loader.dataset()
    return kind(dataset, batch_size=None, sampler=dataset.sampler)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source_of", [lambda loader: loader, with_the_sampler])
def test_lightning_trains_on_another_order_in_every_epoch(source_of, loader, tmp_path):
    seen = []
    expected = epochs_of(loader, 3)
    loader.set_epoch(0)
    lightning_fit(source_of(loader), tmp_path, seen, max_epochs=3)
    assert_same(seen, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source_of", [lambda loader: loader, with_the_sampler])
def test_lightning_validates_each_record_once(source_of, loader, tmp_path):
    seen, validated = [], []
    with Loader(
        loader.batches.path, rank=0, world_size=1, batch_size=5, last="short", shuffle="sequential"
    ) as held_out:
        whole = torch.cat(list(held_out))
        options = {"validation": source_of(held_out), "num_sanity_val_steps": 0}
        lightning_fit(loader, tmp_path, seen, validated=validated, max_epochs=2, **options)
    assert len(whole) == held_out.num_records
    assert len(seen) == 2 * len(loader)
    assert torch.equal(torch.cat(validated), torch.cat([whole, whole]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["loader", "stateful"])
@pytest.mark.parametrize("stop", [5, 12, 17])
def test_lightning_resumes_exactly(kind, stop, loader, stateful, tmp_path):
    """In the first epoch, between two epochs, and in the second."""

    def source_of(loader):
        return loader if kind == "loader" else with_the_sampler(loader, stateful)

    seen = []
    expected = epochs_of(loader, 3)
    loader.set_epoch(0)
    saved = lightning_fit(source_of(loader), tmp_path / "first", seen, max_steps=stop)
    assert len(seen) == stop
    with Loader(loader.batches.path, rank=1, world_size=2) as other:
        lightning_fit(source_of(other), tmp_path / "second", seen, max_epochs=3, ckpt_path=saved)
    assert_same(seen, expected)


# --- documents and fields ----------------------------------------------------------------------------------------
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
    options = trainer_options(tmp_path, max_steps=1, per_device_train_batch_size=4, save_strategy="no")
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


def test_datasets_opens_a_shard_and_a_store_by_the_documented_pattern(tmp_path):
    datasets = pytest.importorskip("datasets")
    tokens, path = np.arange(24).reshape(3, 2, 4), tmp_path / "a.h5"
    fields = {"loss_mask": "u1", "concept": ("f4", (2,))}
    values = {"loss_mask": tokens % 2, "concept": np.stack([tokens, -tokens], axis=-1)}
    write_batches(path, tokens, values, dtype="uint16", fields=fields)
    found = datasets.load_dataset("hdf5", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert found[1]["batches"] == np.arange(8, 16).reshape(2, 4).tolist()
    assert found[1]["fields"]["loss_mask"] == [[0, 1, 0, 1], [0, 1, 0, 1]]
    assert len(found) == 3
    write_stream(tmp_path / "s.h5", np.arange(32), (9, 3, 20))
    convert(tmp_path / "s.h5", "hdf5", tmp_path / "train-h5", batch_size=1, seq_len=4, shards=2)
    page = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
    pattern = re.search(r'data_files="train-h5/(.+?)"', page)[1]
    files = str(tmp_path / "train-h5" / pattern)
    found = datasets.load_dataset("hdf5", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(found) == 8
    assert set(found.column_names) == {"batches", "crc32"}
