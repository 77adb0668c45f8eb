"""`zb_hdf5.convert`: the conversion of the command, from Python."""

import json
import re

import numpy as np
import pytest
from commandline import succeed
from contents import batches_of

from zb_hdf5 import ArgumentError, BackendError, ExistsError, convert
from zb_hdf5.converters.cli import convert_commands as command
from zb_hdf5.converters.engines import CountedWork, noted_work
from zb_hdf5.converters.merge import merge_parts

ROWS = np.random.default_rng(4).integers(0, 50_000, (40, 16), dtype=np.uint16)


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", ROWS.reshape(-1))
    return tmp_path / "tokens.npy"


def test_the_files_are_those_of_the_command(tokens, tmp_path):
    report = convert(tokens, "hdf5", tmp_path / "here", batch_size=4, seq_len=16, seed=3, num_shards=2)
    options = ["--batch-size", 4, "--seq-len", 16, "--seed", 3, "--shards", 2, "--quiet"]
    succeed(command, "npy-to-hdf5", tokens, tmp_path / "there", *options)
    assert report.num_batches == 10
    shards = [json.loads((tmp_path / name / "shards.json").read_text())["shards"] for name in ("here", "there")]
    assert shards[0] == shards[1]


def test_impossible_arguments_are_refused(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "x.h5", batch_size=4, seq_len=16)
    with pytest.raises(FileExistsError) as caught:
        convert(tokens, "hdf5", tmp_path / "x.h5", batch_size=4, seq_len=16)
    assert isinstance(caught.value, ExistsError)
    for source, target, options, message in (
        (tokens, "zip", {}, "target"),
        (tmp_path / "x.h5", "batch", {"seed": 1, "pad_id": 3}, "pad_id, seed belong to npy"),
        ([tmp_path / "x.h5"] * 2, "batch", {}, "expected one"),
        ([], "batch", {}, "none"),
        (tokens, "hdf5", {"dataset": "tokens"}, "dataset"),
    ):
        with pytest.raises(ArgumentError, match=message):
            convert(source, target, tmp_path / "y", **options)
    with pytest.raises(BackendError):
        convert(tmp_path / "x.h5", "batch", tmp_path / "y.batch", source_format="batch")


NUMBERS = ["num_shards", "shard_bytes", "seq_len", "batch_size", "workers", "memory_bytes"]


@pytest.mark.parametrize(("name", "value", "expected"), [
    *((name, value, f"at least 1, found {value}") for name in NUMBERS for value in (0, -1)),
    *(("part", part, f"(i, n) with i from 0 to n - 1, found {part}") for part in ((3, 3), (-1, 3), (0, 0))),
])  # fmt: skip
def test_a_number_or_a_part_that_cannot_be_is_named(tokens, tmp_path, name, value, expected):
    how = {"batch_size": 4, "seq_len": 16, name: value}
    with pytest.raises(ArgumentError, match=f"^{re.escape(f'{name} must be {expected}')}$"):
        convert(tokens, "hdf5", tmp_path / "out", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]


def test_a_folder_with_an_index_is_a_store_and_no_folder_of_arrays(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "out", batch_size=4, seq_len=16, shuffle=False)
    (tmp_path / "out/below").mkdir()
    np.save(tmp_path / "out/below/other.npy", ROWS)
    convert(tmp_path / "out", "batch", tmp_path / "copy", dtype="uint16")
    np.testing.assert_array_equal(np.concatenate(batches_of(tmp_path / "copy")), ROWS)


def test_stores_and_streams_record_their_largest_id_and_copies_stay_equal(tokens, tmp_path):
    shape = {"batch_size": 4, "seq_len": 16, "num_shards": 2}
    convert(tokens, "hdf5", tmp_path / "store", **shape)
    for target, source in (("batch", "store"), ("hdf5", "batch")):
        convert(tmp_path / source, target, tmp_path / ("back" if source == "batch" else target), dtype="uint16")
    index = json.loads((tmp_path / "store/shards.json").read_text())
    assert (index["source"]["max_token"], index["vocab_size"]) == (ROWS.max(), ROWS.max() + 1)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("store", "back")]
    assert files[0] == files[1]
    for number in range(2):
        convert(tokens, "hdf5", tmp_path / "parts", **shape, part=(number, 2))
    merge_parts(tmp_path / "parts")
    assert (tmp_path / "parts/shards.json").read_bytes() == (tmp_path / "store/shards.json").read_bytes()
    assert convert(tokens, "hdf5", tmp_path / "store", **shape, resume=True).kept.shards == 2
    np.save(tmp_path / "flat.npy", ROWS.reshape(-1))
    convert(tmp_path / "flat.npy", "stream", tmp_path / "stream", boundary_token_id=1)
    convert(tmp_path / "stream", "hdf5", tmp_path / "of-stream", batch_size=4, seq_len=16)
    for name in ("stream", "of-stream"):
        assert json.loads((tmp_path / name / "shards.json").read_text())["source"]["max_token"] == ROWS.max()


def test_progress_reaches_its_end_when_the_last_shard_is_on_the_disk(tmp_path):
    """The flush is work: a shard whose tokens are all written is not done."""
    np.save(tmp_path / "in.npy", np.arange(40 * 32 * 64, dtype="<u2"))
    total, amounts = 40 * 32 * 64, []
    how = {"batch_size": 32, "seq_len": 64, "num_shards": 2, "workers": 1, "progress": amounts.append}
    convert(tmp_path / "in.npy", "hdf5", tmp_path / "out", **how)
    assert (sum(amounts), min(amounts)) == (total, 0)
    done = np.cumsum(amounts).tolist()
    for written in (total / 3, total * 5 / 6):  # all tokens of one shard, or of both
        assert any(abs(each - written) < 2 for each in done)
    assert not list(tmp_path.glob("out/*.progress"))


def test_a_process_that_waits_for_another_sees_its_progress_by_a_note(tmp_path):
    note, seen = tmp_path / "note", []
    work = CountedWork(900, seen.append, note)
    assert noted_work(note) == 0
    while not note.exists():
        work.reach(1 / 3)
    assert noted_work(note) == 300
    work.reach(1.0)
    assert sum(seen) == 900
    note.write_text("")  # it is being written
    assert noted_work(note) == 0
