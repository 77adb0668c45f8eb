"""Records that are cut across the ends of files: a conversion has those that are read in place."""

import h5py
import numpy as np
import pytest
from contents import batches_of
from hypothesis import given
from hypothesis import strategies as st
from interrupted import Failing, Stops

from zb_hdf5 import ConvertError, Loader, convert, open_reader
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.converters.record_places import RecordPlaces

LENGTHS = [700, 0, 700, 3, 1111, 700, 512]
TOKENS = np.arange(sum(LENGTHS), dtype=np.uint16)
SHAPE = {"seq_len": 64, "batch_size": 4, "workers": 1}


def write_npy(path, ids):
    np.save(path.with_suffix(".npy"), ids)


def write_hdf5(path, ids):
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file["input_ids"] = ids


def write_llmc(path, ids):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.with_suffix(".bin").write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


WRITERS = {"npy": write_npy, "hdf5": write_hdf5, "llmc": write_llmc}


@pytest.fixture(params=WRITERS)
def folder(request, tmp_path):
    """Return a folder of files that are one stream together."""
    (tmp_path / "in").mkdir()
    start = 0
    for number, length in enumerate(LENGTHS):
        WRITERS[request.param](tmp_path / f"in/part_{number}", TOKENS[start : start + length])
        start += length
    return tmp_path / "in"


def records_of(path):
    return batches_of(path).reshape(-1, SHAPE["seq_len"])


def test_a_conversion_has_the_records_that_are_read_in_place(folder, tmp_path):
    report = convert(folder, "hdf5", tmp_path / "plain", shuffle=False, remainder="pad", **SHAPE)
    count = len(TOKENS) // 64
    assert np.array_equal(records_of(tmp_path / "plain")[:count], TOKENS[: count * 64].reshape(-1, 64))
    assert report.counts.dropped == {"file tail": len(TOKENS) % 64}
    with open_reader(folder, seq_len=64, batch_size=1) as reader:
        assert np.array_equal(
            np.concatenate([reader[k] for k in range(len(reader))]), records_of(tmp_path / "plain")[:count]
        )
    in_place = Loader(folder, batch_size=4, seq_len=64, seed=3, shuffle="records", rank=0, world_size=1)
    convert(folder, "hdf5", tmp_path / "out", seed=3, **SHAPE)
    stored = records_of(tmp_path / "out")
    with in_place as loader:
        assert loader.num_records == count
    assert {*map(tuple, stored.tolist())} <= {*map(tuple, TOKENS[: count * 64].reshape(-1, 64).tolist())}
    assert len({*stored[:, 0].tolist()}) == len(stored)


def test_a_record_may_be_longer_than_every_file(folder, tmp_path):
    convert(folder, "hdf5", tmp_path / "out", shuffle=False, seq_len=1500, batch_size=1)
    assert np.array_equal(batches_of(tmp_path / "out").reshape(2, -1), TOKENS[:3000].reshape(2, -1))


def test_two_passes_parts_and_stops_give_the_same_files(folder, tmp_path):
    options = {**SHAPE, "shards": 3, "seed": 5}
    convert(folder, "hdf5", tmp_path / "one", **options)
    expected = records_of(tmp_path / "one")
    convert(folder, "hdf5", tmp_path / "passes", shuffle_method="two-pass", **options)
    for job in range(3):
        convert(folder, "hdf5", tmp_path / "parts", shard_range=(job, 3), **options)
    merge_parts(tmp_path / "parts")
    with pytest.raises(Stops):
        convert(folder, "hdf5", tmp_path / "stopped", engine=Failing(1), **{**options, "workers": None})
    convert(folder, "hdf5", tmp_path / "stopped", resume=True, **options)
    for name in ("passes", "parts", "stopped"):
        assert np.array_equal(records_of(tmp_path / name), expected)


def test_an_id_that_does_not_fit_is_named_with_its_place_in_its_file(tmp_path):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/a.npy", np.zeros(100, np.int32))
    np.save(tmp_path / "in/b.npy", np.r_[np.zeros(20, np.int32), 99_999, np.zeros(100, np.int32)])
    with pytest.raises(ConvertError, match=r"b\.npy: token id 99999 at index 20 "):
        convert(tmp_path / "in", "hdf5", tmp_path / "out", dtype="uint16", seq_len=64, batch_size=1)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_the_places_of_records(arrays, seq_len):
    shapes = [(length,) if is_stream else (length, seq_len) for length, is_stream in arrays]
    places = RecordPlaces(shapes, seq_len)
    expected, runs = [], []
    for number, shape in enumerate(shapes):
        positions = [(number, token) for token in range(int(np.prod(shape)))]
        if number and len(shape) == len(shapes[number - 1]) == 1:
            runs[-1] += positions
        else:
            runs.append(positions)
    for run in runs:
        expected += [run[k : k + seq_len] for k in range(0, len(run) - seq_len + 1, seq_len)]
    assert places.total == len(expected)
    assert places.num_left_over == sum(len(run) % seq_len for run in runs)
    starts = places.starts(np.arange(len(expected)))
    found = [
        [
            (part.file_number, part.start + k)
            for part in places.parts(start)
            for k in range(part.inside.stop - part.inside.start)
        ]
        for start in starts.tolist()
    ]
    assert found == expected
    alone = [
        [(number, k + token) for token in range(seq_len)]
        for number, (length, is_stream) in enumerate(arrays)
        for k in range(0, (length if is_stream else length * seq_len) - seq_len + 1, seq_len)
    ]
    assert places.cuts_files == (alone != expected)
    assert places.are_whole(starts).tolist() == [len({number for number, _ in record}) == 1 for record in expected]
