"""`zb which` names the rows that made a step; the tokens of those rows are the tokens of the step."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from zb_hdf5 import Loader, MixedLoader, ShardEntry, ShardIndex, StoreMeta, open_reader, open_writer
from zb_hdf5.commands.zb import zb

TOKENS = np.random.default_rng(8).integers(0, 60_000, (30, 4, 16), dtype=np.uint16)


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    entries = []
    for number, part in enumerate(np.array_split(TOKENS, 3)):
        path = folder / f"shard-{number}.h5"
        with open_writer(path, batch_size=4, seq_len=16, dtype="uint16") as writer:
            writer.write(part)
            info = writer.finish()
        entries.append(ShardEntry.of(info))
    ShardIndex(StoreMeta(4, 16, np.dtype("<u2")), tuple(entries)).save(folder)
    return folder


def rows_named(batch):
    """Read the rows that a report names, straight from the shard files."""
    rows = []
    for part in batch["rows"]:
        with open_reader(part["shard"]) as reader:
            rows += [reader.read_batch(part["batch"])[row] for row in part["rows"]]
    return np.array(rows)


def run(*arguments, code=0):
    result = CliRunner().invoke(zb, ["which", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)["batches"] if code == 0 else result.stderr


@pytest.mark.parametrize(("shuffle", "batch_size"), [("global", 4), ("records", 4), ("block", 8), ("global", 6)])
def test_named_rows_are_the_tokens_of_the_step(store, tmp_path, shuffle, batch_size):
    loaders = [Loader(store, shuffle=shuffle, batch_size=batch_size, rank=r, world_size=2, epoch=1) for r in range(2)]
    steps = list(zip(*loaders, strict=True))
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loaders[0].state_dict()))
    for step in (0, 1, len(steps) - 1):
        found = run(store, "--state", state, "--step", step, "--world-size", 2, "--batch-size", batch_size)
        for batch, expected in zip(found, steps[step], strict=True):
            if shuffle == "records":  # rows are grouped by stored batch: compare as sets of records
                assert sorted(rows_named(batch).tolist()) == sorted(expected.tolist())
            else:
                np.testing.assert_array_equal(rows_named(batch), expected.numpy())


def test_mixtures_are_answered_before_and_after_a_change_of_weights(store, tmp_path):
    sources = {"a": store, "b": store / "shard-1.h5"}
    mixed = MixedLoader(sources, {"a": 1, "b": 1}, rank=0, world_size=1)
    iterator = iter(mixed)
    seen = [next(iterator) for _ in range(9)]
    mixed.set_weights({"a": 1, "b": 5})
    seen += [next(iterator) for _ in range(9)]
    state = tmp_path / "state.json"
    state.write_text(json.dumps(mixed.state_dict()))
    for step in (0, 4, 8, 9, 17):
        (batch,) = run(*(f"{name}={path}" for name, path in sources.items()), "--state", state, "--step", step)
        np.testing.assert_array_equal(rows_named(batch), seen[step].numpy())


def test_wrong_states_are_told(store, tmp_path):
    state = tmp_path / "state.json"
    state.write_text("{not json")
    assert "not JSON" in run(store, "--state", state, "--step", 0, code=1)
    state.write_text("{}")
    assert "missing" in run(store, "--state", state, "--step", 0, code=1)
    good = Loader(store, rank=0, world_size=1).state_dict()
    state.write_text(json.dumps(good | {"fingerprint": "sha256:other"}))
    assert "fingerprint" in run(store, "--state", state, "--step", 0, code=1)
    state.write_text(json.dumps(good))
    state.write_text(json.dumps(Loader(store, rank=0, world_size=1).dataset().state_dict()))
    assert "found that of the dataset() of a Loader" in run(store, "--state", state, "--step", 0, code=1)
    state.write_text(json.dumps(good | {"kind": ["loader"]}))
    assert "kind" in run(store, "--state", state, "--step", 0, code=1)
    state.write_text(json.dumps(good))
    assert "end" in run(store, "--state", state, "--step", 10**6, code=2)
