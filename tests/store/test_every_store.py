"""Every command of maintenance over every kind of store: batches and streams, lone files, stores and `.npy` files."""

import json
from functools import partial

import h5py
import numpy as np
import pytest
from commandline import report_of, succeed
from contents import files_in, require_good, write_stream, write_streams
from damage import flip, flip_stored
from reading import begun

from zb_hdf5 import Loader, MixedLoader, ShardIndex, open_reader, rebuild_index, verify_store
from zb_hdf5.commands.findings import diagnose
from zb_hdf5.commands.zb import zb
from zb_hdf5.spec import CRC32, INDEX_NAME
from zb_hdf5.store.rebuild import UNKNOWN_SHUFFLE
from zb_hdf5.store.repair import repair

run = partial(report_of, zb)
RNG = np.random.default_rng(5)
TOKENS = RNG.choice(RNG.integers(0, 50_000, 16), 6000).astype("<u2")  # of few values: they shrink
CHUNK = 256
COMPRESSED = ("compressed store", "compressed stream")
DIGESTED = ("hdf5", "batch", "mixed store", "stream", "stream store", *COMPRESSED)
KINDS = (*DIGESTED, "npy", "npy folder")
STORES = ("mixed store", "stream store", "compressed store")
STREAMS = ("stream", "stream store", "compressed stream", "npy", "npy folder")


@pytest.fixture
def make(tmp_path, make_stored):
    """Return `make(kind) -> path`, of the same tokens in each kind of store."""
    batches, how = TOKENS.reshape(-1, 3, 20), {"chunk_tokens": CHUNK, "vocab_size": 50_000}

    def of_kind(kind):
        if kind in DIGESTED and kind not in STREAMS:
            return make_stored(kind, tmp_path, batches, (7, 50))
        if kind in ("stream", "compressed stream"):
            codec = "gzip" if kind in COMPRESSED else None
            return write_stream(tmp_path / "s.h5", TOKENS, [1000, 0, 5000], codec=codec, **how).path
        if kind == "stream store":
            return write_streams(tmp_path / "s", np.split(TOKENS, (1, 2500)), source={"format": "test"}, **how)
        if kind == "npy":
            np.save(tmp_path / "n.npy", TOKENS)
            return tmp_path / "n.npy"
        (tmp_path / "n").mkdir()
        for number, part in enumerate(np.split(TOKENS, [10, 3000])):
            np.save(tmp_path / "n" / f"{number}.npy", part)
        return tmp_path / "n"

    return of_kind


def damage(path, kind):
    """Flip a bit behind token 4,000."""
    if kind in COMPRESSED:
        file, chunk = (path / "shard-00002.h5", 20) if path.is_dir() else (path, 4000 // CHUNK)
        with h5py.File(file, "r") as h5:
            offset, size = h5["extents"][chunk].tolist()
            assert size < h5["batches" if path.is_dir() else "tokens"].chunks[-1] * 2 * (3 if path.is_dir() else 1)
        flip(file, offset + size // 2, 4)
    else:
        flip_stored(path, TOKENS[4000:4020], mask=4)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_says_how_much_it_has_compared(kind, make):
    path = make(kind)
    seen = []
    totals = []
    reports = verify_store(path, progress=seen.append, announce=totals.append)
    assert sum(report.token_count for report in reports) == 6000
    if kind in DIGESTED:
        assert (totals, sum(seen)) == ([6000], 6000)
        assert {report.outcome for report in reports} == {"verified"}
        assert ("index" in reports[0].checks) == (kind in STORES)
        assert ("documents" in reports[0].checks) == (kind in STREAMS)
        assert run("verify", path)["ok"]
    else:
        assert (totals, seen) == ([], [])
        assert ".npy files hold no digests" in run("verify", path, code=6)["files"][0]["missing"]


@pytest.mark.parametrize("kind", KINDS)
def test_info_and_doctor_describe_it_and_change_nothing(kind, make, tmp_path):
    path = make(kind)
    before = files_in(tmp_path)
    assert run("info", path)["tokens"] == 6000
    found = {finding.name: finding for finding in diagnose(str(path))}
    assert {"locks", "filters", "layout", "open files", "first batch"} <= found.keys()
    assert "problem" not in {finding.state for finding in found.values()}
    assert ("compressed chunks" if kind in COMPRESSED else "1 run, ") in found["layout"].text
    files = len([name for name in before if "shard-" in name and not name.endswith(".crc32")])
    assert f"of {files or (3 if kind == 'npy folder' else 1)} shards" in found["open files"].text
    assert run("doctor", path)["ok"]
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("kind", DIGESTED)
def test_repair_finds_a_good_one_whole_and_leaves_it_alone(kind, make, tmp_path):
    path = make(kind)
    before = files_in(tmp_path)
    reports = repair(str(path))
    assert {(report.state, report.dropped_tokens) for report in reports} == {("whole", 0)}
    assert sum(report.kept_tokens for report in reports) == 6000
    unit = "document" if kind in STREAMS else "batch"
    assert {report.unit for report in reports} == {unit}
    assert f"whole: {reports[0].kept} {unit}" in reports[0].line()
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(("kind", "said"), [("npy", "ends in .batch or .h5"), ("npy folder", "no shards.json")])
def test_repair_refuses_npy_files(kind, said, make, tmp_path):
    path = make(kind)
    before = files_in(tmp_path)
    assert said in run("repair", path, code=1)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("kind", STORES)
def test_a_rebuilt_index_is_the_old_one(kind, make):
    path = make(kind)
    before = ShardIndex.load(path)
    assert rebuild_index(path, force=True) == before
    (path / INDEX_NAME).unlink()
    made = rebuild_index(path)
    made = made.without_max_token()  # the HDF5 files have it, and the index that was lost had not
    assert (made.shards, made.meta, made.shuffle) == (before.shards, before.meta, UNKNOWN_SHUFFLE)
    require_good(path)


@pytest.mark.parametrize("kind", [kind for kind in DIGESTED if kind != "batch"])
@pytest.mark.thin
def test_damage_is_found_by_verify_and_gone_after_repair(kind, make):
    path = make(kind)
    damage(path, kind)
    assert "bad" in {report.outcome for report in verify_store(path)}
    run("verify", path, code=3)
    if kind == "stream store":  # the only document of its shard is bad
        assert "--force to leave its 1 document out" in run("repair", path, code=4)
        run("repair", path, "--force")
    else:
        run("repair", path)
    after = path if path.is_dir() else path.with_name(f"{path.stem}.repaired.h5")
    require_good(after)


@pytest.mark.parametrize("kind", ["hdf5", "stream"])
def test_a_damaged_crc32_row_costs_no_token(kind, make):
    path = make(kind)
    with h5py.File(path, "r+") as h5:
        h5[CRC32][2] ^= 1
    [report] = repair(path)
    assert (report.kept_tokens, report.dropped, report.dropped_tokens) == (6000, [], 0)
    assert "no token is" in report.reason
    require_good(path.with_name(f"{path.stem}.repaired.h5"))
    whole = (open_reader(each, **shape_for(kind, 3, 20)) for each in (path, report.output))
    with next(whole) as before, next(whole) as after:
        np.testing.assert_array_equal(list(after), list(before))


def tokens_of(rows):
    """Read the rows that a report names from the files, one by one."""
    found = {}
    for part in rows:
        if "row" not in part:
            with open_reader(part["shard"]) as reader:
                found |= {len(found) + k: list(reader.read_batch(part["batch"])[r]) for k, r in enumerate(part["rows"])}
        elif part["shard"].endswith(".npy"):
            found.setdefault(part["row"], []).extend(np.load(part["shard"])[part["start"] : part["stop"]])
        else:
            with open_reader(part["shard"], batch_size=1, seq_len=1) as reader:
                found.setdefault(part["row"], []).extend(reader.tokens[part["start"] : part["stop"]])
    return np.array([found[row] for row in sorted(found)])


def shape_for(kind, batch_size, seq_len):
    return {"batch_size": batch_size, "seq_len": seq_len} if kind in STREAMS else {"batch_size": batch_size}


@pytest.mark.parametrize(
    ("shuffle", "batch_size"), [("global", 3), ("records", 3), ("sequential", 3), ("block", 6), ("global", 4)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_which_names_the_tokens_of_a_step(kind, shuffle, batch_size, make, tmp_path):
    path, state = make(kind), tmp_path / "state.json"
    options = shape_for(kind, batch_size, 20)
    loaders = [begun(Loader(path, shuffle=shuffle, rank=rank, world_size=2, **options), 1) for rank in range(2)]
    steps = list(zip(*loaders, strict=True))
    state.write_text(json.dumps(loaders[0].state_dict()))
    for step in (0, 1, len(steps) - 1):
        asked = ("--step", step, "--world-size", 2, "--batch-size", batch_size)
        found = run("which", path, "--state", state, *asked)["batches"]
        for batch, expected in zip(found, steps[step], strict=True):
            named = tokens_of(batch["rows"])
            if kind in STREAMS:
                np.testing.assert_array_equal(named, expected)
            else:  # grouped by stored batch
                assert sorted(named.tolist()) == sorted(expected.tolist())
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.thin
def test_which_knows_the_targets_and_another_batch_size(kind, make, tmp_path):
    path, state = make(kind), tmp_path / "state.json"
    with Loader(path, batch_size=4, seq_len=33, targets=True, rank=0, world_size=1) as first:
        state.write_text(json.dumps(first.state_dict()))
        first.set_batch_size(7)
        steps = list(first)
    found = run("which", path, "--state", state, "--step", 5, "--batch-size", 7)["batches"][0]
    inputs, targets = steps[5]
    np.testing.assert_array_equal(tokens_of(found["rows"])[:, :-1], inputs)
    np.testing.assert_array_equal(tokens_of(found["rows"])[:, 1:], targets)
    shown = succeed(zb, "which", path, "--state", state, "--step", 5, "--batch-size", 7)
    row = found["rows"][0]
    assert f"{row['shard']} tokens {row['start']:,} to {row['stop']:,} (row 0)" in " ".join(shown.stdout.split())


@pytest.mark.parametrize("kinds", [("mixed store", "hdf5"), ("stream store", "npy folder")])
def test_which_answers_for_mixtures_before_and_after_a_change_of_weights(kinds, make, tmp_path):
    sources, state = dict(zip("ab", map(make, kinds), strict=True)), tmp_path / "state.json"
    shape = shape_for(kinds[0], 3, 20)
    with MixedLoader(sources, {"a": 1, "b": 1}, rank=0, world_size=1, **shape) as mixed:
        steps = [next(mixed) for _ in range(9)]
        mixed.set_weights({"a": 1, "b": 5})
        steps += [next(mixed) for _ in range(9)]
        state.write_text(json.dumps(mixed.state_dict()))
    for step in (0, 4, 8, 9, 17):
        named = (f"{name}={path}" for name, path in sources.items())
        [batch] = run("which", *named, "--state", state, "--step", step)["batches"]
        np.testing.assert_array_equal(tokens_of(batch["rows"]), steps[step])


def test_which_refuses_states_of_something_else(make, tmp_path):
    stream, state = make("stream"), tmp_path / "state.json"
    with Loader(make("mixed store"), rank=0, world_size=1) as batches:
        state.write_text(json.dumps(batches.state_dict()))
    assert "expected the fingerprint of windows" in run("which", stream, "--state", state, "--step", 0, code=1)
    with Loader(make("npy folder"), batch_size=2, seq_len=8, rank=0, world_size=1) as other:
        state.write_text(json.dumps(other.state_dict()))
    assert "fingerprint" in run("which", stream, "--state", state, "--step", 0, code=1)
    with Loader(stream, batch_size=2, seq_len=8, rank=0, world_size=1) as windows:
        state.write_text(json.dumps(windows.state_dict()))
    assert "after the end" in run("which", stream, "--state", state, "--step", 10**6, code=2)
