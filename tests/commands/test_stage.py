"""zb stage: what it copies is what the loaders of these ranks read, and then they read nothing else."""

import json
import re
import shutil
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from commandline import report_of, run_zb
from contents import write_batches, write_stream
from contract import assert_same, parts_of, random_tokens
from processes import killed_when
from reading import begun

from zb_hdf5 import Field, Loader, console, open_field_set, open_reader
from zb_hdf5.commands.staging import runs_of
from zb_hdf5.commands.zb import zb
from zb_hdf5.files.pages import NO_PAGES
from zb_hdf5.files.tokens import ClosedTokens
from zb_hdf5.store.cache import column_of

TOKENS = random_tokens(64, 4, 256)
MASK = random_tokens(64, 4, 256, "uint16", seed=3).astype("u1")
WORLD = 8


@pytest.fixture(scope="module")
def train_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "train.h5"
    return write_batches(path, TOKENS, {"mask": MASK}, fields={"mask": "u1"}).path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def stage(*arguments, code=0):
    done = run_zb("stage", *arguments)
    assert done.exit_code == code, done.output
    return done


def staged(*arguments):
    return report_of(zb, "stage", *arguments, "--quiet")


def batches_in(folder, store, **options):
    with open_reader(store, cache=folder, **options) as reader:
        return {index for index in range(reader.num_batches) if column_of(reader).has(index)}


class Nothing(ClosedTokens):
    """Tokens that cannot be read."""

    pages = NO_PAGES


def steps_of(folder, store, state=None, rank=0, epoch=0, **options):
    """Return all steps of a rank; those of a cache are of a loader whose source has nothing."""
    with begun(Loader(store, rank=rank, world_size=WORLD, cache=folder, **options), epoch) as loader:
        for reader in (loader.batches, *map(loader.batches.field, options.get("fields", ()))) if folder else ():
            reader.tokens.tokens.close()
            reader.tokens.source = reader.tokens.tokens = Nothing(reader.tokens.tokens)
        if state is not None:
            loader.load_state_dict(state)
        return [parts_of(step) for step in loader]


def require_in_cache(folder, store, **how):
    """Compare the steps from a cache alone with the steps of a loader without one."""
    found = steps_of(folder, store, **how)
    assert len(found) > 0
    assert_same(found, steps_of(None, store, **how))


@pytest.mark.parametrize("options", [
    {},
    {"shuffle": "records", "seed": 7, "batch_size": 2},
    {"shuffle": "block", "epoch": 3},
    {"shuffle": "sequential", "batch_size": 6},
    {"seq_len": 64, "batch_size": 8},
], ids=str)  # fmt: skip
@pytest.mark.thin
def test_the_ranks_read_what_was_copied_and_nothing_else_was(options, train_file, folder):
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = staged(train_file, folder, *words, "--ranks", "2,5-6", "--world-size", WORLD)
    for rank in (2, 5, 6):
        require_in_cache(folder, train_file, rank=rank, **options)
    assert found["copied"] == found["units"] == len(batches_in(folder, train_file))
    if options.get("shuffle") != "records":
        assert len(batches_in(folder, train_file)) < len(TOKENS)


@pytest.mark.parametrize("done", [3, 8])
def test_a_state_says_what_is_left_of_its_epoch_or_that_the_next_one_is(done, train_file, folder, tmp_path):
    options = {"shuffle": "global", "seed": 9, "batch_size": 4}
    with begun(Loader(train_file, rank=0, world_size=WORLD, **options), 2) as loader:
        assert len([loader.get_batch() for _ in range(done)]) <= len(loader) == 8
        state = loader.state_dict()
    (tmp_path / "state.json").write_text(json.dumps(state))
    arguments = (train_file, folder, "--state", tmp_path / "state.json", "--ranks", "0-3", "--world-size", WORLD)
    assert staged(*arguments)["copied"] == (8 - done or 8) * 4  # steps that are left, by ranks
    if done == 8:
        options, state = {**options, "epoch": 3}, None
    require_in_cache(folder, train_file, state=state, rank=3, **options)


def test_fields_are_copied_too(train_file, folder):
    found = staged(train_file, folder, "--field", "mask")
    num_bytes = TOKENS.nbytes + MASK.nbytes
    assert found == {"unit": "batch", "units": 128, "num_bytes": num_bytes, "present": 0, "copied": 128}
    options = {"fields": ["mask"], "batch_size": 4}
    require_in_cache(folder, train_file, rank=1, **options)


SET_FIELDS = [Field("w", np.dtype("f4"), (2,)), Field("score", np.dtype("f8"), unit="record")]


def write_set(path, **options):
    """Write a set beside tokens, whose values follow from the numbers of the records."""
    with open_field_set(path, "t", SET_FIELDS, part_bytes=300_000, **options) as found:
        for step in found.missing(quiet=True, batch_size=64):
            numbers = np.asarray(step["records"], "f4")
            w = np.arange(step["tokens"].shape[1] * 2).reshape(-1, 2) + 1000 * numbers[:, None, None]
            found.write(step["records"], w=w.astype("f4"), score=numbers.astype("f8"))
        found.finish()


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"shuffle": "records", "batch_size": 2}, {"seq_len": 64, "batch_size": 8}], ids=str
)
def test_field_sets_are_copied_too(options, train_file, folder, tmp_path):
    path = shutil.copy(train_file, tmp_path / "t.h5")
    write_set(path)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = staged(path, folder, *words, "--field-set", "t", "--ranks", 1, "--world-size", WORLD)
    of_set = found["field_sets"]["t"]
    assert of_set["units"] == of_set["copied"] > 0
    assert of_set["num_bytes"] == of_set["units"] // 2 * (256 * 2 * 4 + 8)
    require_in_cache(folder, path, rank=1, fields=["t/w", "t/score"], **options)
    again = staged(path, folder, *words, "--field-set", "t", "--ranks", 1, "--world-size", WORLD)
    assert again["field_sets"]["t"]["present"] == of_set["units"]


def test_the_report_counts_units_of_each_field(train_file, folder, tmp_path):
    path = shutil.copy(train_file, tmp_path / "t.h5")
    write_set(path)
    told = stage(path, folder, "--field", "mask", "--field-set", "t").stdout
    assert "128 of 128 batches of tokens and fields, " in told
    assert "512 of 512 records of its fields, " in told  # two fields of 256 records


def test_the_set_of_a_stream_is_copied_too(tmp_path, folder):
    path = tmp_path / "s.h5"
    write_stream(path, random_tokens(1, 1, 9000, "uint16").reshape(-1), [9000], chunk_tokens=512)
    write_set(path, seq_len=96, stride=32)
    words = ["--batch-size", 2, "--seq-len", 64, "--targets"]
    staged(path, folder, *words, "--field-set", "t", "--ranks", 1, "--world-size", WORLD)
    require_in_cache(folder, path, rank=1, fields=["t/w"], batch_size=2, seq_len=64, targets=True)


def test_a_set_that_was_written_again_is_copied_again(train_file, folder, tmp_path):
    path = shutil.copy(train_file, tmp_path / "t.h5")
    write_set(path)
    staged(path, folder, "--field-set", "t")
    with open_field_set(path, "t") as found:
        for step in found.missing(overwrite=(3, 4), quiet=True):
            found.write(step["records"], w=np.full((1, 256, 2), 5, "f4"), score=np.ones(1))
        found.finish()
    assert staged(path, folder, "--field-set", "t")["field_sets"]["t"]["present"] == 0
    require_in_cache(folder, path, rank=1, fields=["t/w", "t/score"], batch_size=4)


def test_a_set_of_documents_is_not_staged(tmp_path, folder):
    path = tmp_path / "s.h5"
    write_stream(path, random_tokens(1, 1, 9000, "uint16").reshape(-1), [4000, 5000], chunk_tokens=512)
    fields = [Field("score", np.dtype("f4"), unit="document")]
    with open_field_set(path, "d", fields) as found:
        found.write([0, 1], score=[1.0, 2.0])
        found.finish()
    done = stage(path, folder, "--seq-len", 64, "--batch-size", 2, "--field-set", "d", code=2)
    assert "the field set d has values of documents, which no cache keeps" in done.stderr


@pytest.mark.parametrize("targets", [False, True])
def test_windows_of_a_stream(targets, tmp_path, folder):
    write_stream(tmp_path / "s.h5", random_tokens(1, 1, 9000, "uint16").reshape(-1), [9000], chunk_tokens=512)
    options = {"batch_size": 2, "seq_len": 64, "targets": targets}
    words = ["--batch-size", 2, "--seq-len", 64, *["--targets"] * targets]
    path = tmp_path / "s.h5"
    found = staged(path, folder, *words, "--ranks", 1, "--world-size", WORLD)
    assert found["copied"] == 6  # chunks of 512 tokens
    require_in_cache(folder, path, rank=1, **options)


def test_windows_behind_the_last_whole_batch_of_a_state_are_copied_too(tmp_path, folder):
    write_stream(tmp_path / "s.h5", random_tokens(1, 1, 9000, "uint16").reshape(-1), [9000], chunk_tokens=512)
    with Loader(tmp_path / "s.h5", batch_size=60, seq_len=64, rank=0, world_size=1) as loader:
        state = loader.state_dict() | {"position": 100}  # 120 windows have the order of two batches, 20 follow them
    (tmp_path / "state.json").write_text(json.dumps(state))
    words = ("--state", tmp_path / "state.json", "--batch-size", 2, "--ranks", "0-7", "--world-size", WORLD)
    assert staged(tmp_path / "s.h5", folder, *words)["copied"] > 0
    for rank in (0, 7):
        require_in_cache(folder, tmp_path / "s.h5", state=state, rank=rank, batch_size=2, seq_len=64)


def test_units_that_are_there_are_not_copied_again(train_file, folder, monkeypatch):
    with monkeypatch.context() as patch:
        times = iter(range(0, 10**6, 60))
        patch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(times)))
        shown = stage(train_file, folder.with_name("other")).stderr
    assert shown.startswith("stage: ")  # a pipe gets lines and no bar
    assert "B/s" in shown
    assert "\r" not in shown
    assert "staged  32 of 32 batches" in stage(train_file, folder, "--ranks", "0-3", "--world-size", WORLD).stdout
    done = stage(train_file, folder, "--ranks", "0-7", "--world-size", WORLD)
    assert done.stdout == "staged  64 of 64 batches, 256.0 KiB; 32 were there already\n"
    assert staged(train_file, folder)["copied"] == 0


def test_a_full_cache_is_said_and_no_error(train_file, folder, monkeypatch):
    monkeypatch.setattr(console, "LOG_INTERVAL_S", 0)
    done = stage(train_file, folder, "--cache-bytes", "100KiB")
    staged_line, left_line = done.stdout.splitlines()
    assert staged_line.startswith("staged    2")
    assert left_line.startswith("left out  4")
    assert left_line.endswith(f"batches: the cache or its disk is full; see 'zb cache ls {folder}'")
    assert re.fullmatch(r"stage: 100%  [\d.]+ .?B/s  in \d+:\d\d", done.stderr.splitlines()[-1]), "no more comes"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--ranks", "8-15", "--world-size", "8"], "expected ranks below --world-size 8, found 15"),
    (["--ranks", "0-999999999"], "expected ranks below --world-size 1, found 999999999"),
    (["--ranks", "0-99999999999"], "expected ranks such as 8-15"),
    (["--ranks", "1,8-5", "--world-size", "8"], "expected ranks such as 8-15 or 0,4,8-15, found '1,8-5'"),
    (["--ranks", "7-5"], "found '7-5'"),
    (["--ranks", "a"], "found 'a'"),
    (["--cache-bytes", "much"], "'much' is not a size"),
    (["--field", "none"], "expected a field that is stored (mask), found 'none'"),
    (["--batch-size", "1000"], "too few"),
])  # fmt: skip
def test_wrong_usage_is_one_message(arguments, message, train_file, folder, tmp_path):
    assert message in stage(train_file, folder, *arguments, code=2).stderr
    (tmp_path / "file").touch()
    done = stage(train_file, tmp_path / "file", code=2)
    assert done.stderr.startswith(f"Error: {tmp_path}/file: expected a cache folder that can be written")
    with Loader(train_file, rank=0, world_size=1) as loader:
        state = {**loader.state_dict(), "fingerprint": "sha256:other"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert "fingerprint" in stage(train_file, folder, "--state", tmp_path / "state.json", code=1).stderr


def test_it_can_be_killed_and_goes_on(tmp_path, folder):
    tokens = random_tokens(1500, 4, 1024)
    write_batches(tmp_path / "large.h5", tokens)
    command = ["stage", str(tmp_path / "large.h5"), str(folder), "--quiet"]
    killed_when(
        lambda: any(path.stat().st_size for path in folder.glob("*/*.marks")),
        lambda: zb.main(command, standalone_mode=False),
    )
    with open_reader(tmp_path / "large.h5", cache=folder) as reader:
        column, out = column_of(reader), np.empty(tokens.shape[1:], tokens.dtype)
        there = [index for index in range(len(tokens)) if column.has(index)]
        for index in there:
            assert column.read_into(index, out)
            np.testing.assert_array_equal(out, tokens[index])
    found = staged(tmp_path / "large.h5", folder)
    assert (found["present"], found["copied"]) == (len(there), len(tokens) - len(there))
    with open_reader(tmp_path / "large.h5", cache=folder) as reader:
        reader.tokens.source = reader.tokens.tokens = Nothing(reader.tokens.tokens)
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)


def test_reads_are_large_and_in_the_order_of_the_store():
    batches = np.array([0, 1, 2, 5, 7, 8, 9, 10, 11, 12])
    found = list(runs_of(batches, 1 << 20))
    assert [number for first, count in found for number in range(first, first + count)] == batches.tolist()
    assert all(count <= 4 for _, count in found)
    assert len(found) == 4
    assert all(a < b for (a, _), (b, _) in pairwise(found))
    assert list(runs_of(batches[:0], 1 << 20)) == []
