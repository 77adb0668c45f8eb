"""Ids of other integer dtypes: the same batches by every way of reading, and an error for a value that is not an id."""

import numpy as np
import pytest
import torch
from contract import is_refused

from zb_hdf5 import Loader, errors, open_corpus, open_reader
from zb_hdf5.loaders.order import SHUFFLES

IDS = np.random.default_rng(5).integers(0, 120, 4000)
IDS.flags.writeable = False  # for all tests
#: Dtype of the file -> the largest id that it may have.
DTYPES = {
    "u1": 2**8 - 1, "i1": 2**7 - 1, "u2": 2**16 - 1, "<i2": 2**15 - 1, ">i2": 2**15 - 1, "<u4": 2**32 - 1,
    ">u4": 2**32 - 1, "<i4": 2**31 - 1, ">i4": 2**31 - 1, "<i8": 2**32 - 1, ">i8": 2**32 - 1, "<u8": 2**32 - 1,
}  # fmt: skip
SHAPE = {"batch_size": 3, "seq_len": 50, "rank": 0, "world_size": 1}


def write(path, ids, dtype):
    np.save(path, np.asarray(ids).astype(dtype))
    return path


def write_parts(folder):
    """Write two files, of which the second one has a value that is not an id where the fingerprint takes no sample."""
    folder.mkdir()
    ids = np.resize(IDS, 130_000)
    for number, part in enumerate(np.split(ids, [1001])):
        part[6000 if number else 0] = -3 if number else 1
        write(folder / f"{number}.npy", part, "<i4")
    return folder


def batches_of(path, **how):
    with Loader(path, **SHAPE, seed=2, **how) as loader:
        return torch.stack(list(loader))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_of_reading_gives_the_same_ids(dtype, tmp_path):
    path = write(tmp_path / "s.npy", IDS, dtype)
    plain = write(tmp_path / "plain.npy", IDS, "<u4")
    for shuffle in SHUFFLES:
        expected = batches_of(plain, access="pread", prefetch=0, shuffle=shuffle)
        for access in ("auto", "mmap", "pread"):
            assert torch.equal(batches_of(path, access=access, shuffle=shuffle), expected), (shuffle, access)
        narrow = batches_of(path, shuffle=shuffle, dtype=torch.int32)
        assert narrow.dtype == torch.int32
        assert torch.equal(narrow, expected.int())
    for overlap in (0, 1):
        with open_reader(path, batch_size=3, seq_len=50, overlap=overlap) as reader:
            records = np.array([7, 0, 12])
            rows = np.empty((3, 50 + overlap), reader.dtype)
            reader.read_records_into(records, rows)
            np.testing.assert_array_equal(rows, [IDS[50 * record :][: 50 + overlap] for record in records])
            np.testing.assert_array_equal(reader[2].ravel()[:50], IDS[300:350])
            assert not reader[2].flags.writeable
    with open_corpus(path) as stream:
        np.testing.assert_array_equal(stream.tokens[17:3999], IDS[17:3999])


@pytest.mark.parametrize("dtype", [name for name, limit in DTYPES.items() if "i" in name or limit < 2**32 - 1])
def test_the_largest_id_is_read(dtype, tmp_path):
    ids = IDS.copy()
    ids[[0, 149, 3000]] = DTYPES[dtype]
    path = write(tmp_path / "s.npy", ids, dtype)
    found = batches_of(path, shuffle="sequential")
    np.testing.assert_array_equal(found.numpy().ravel(), ids[: found.numel()])


@pytest.mark.parametrize(("dtype", "bad"), [
    ("i1", -1), ("<i2", -5), (">i2", -5), ("<i4", -1), ("<i4", -(2**31)), (">i4", -1), ("<i8", -1), (">i8", -7),
    ("<i8", 2**32), ("<u8", 2**63), ("<i8", -(2**63)),
])  # fmt: skip
@pytest.mark.parametrize("access", ["auto", "pread"])
def test_a_value_that_is_no_id_is_an_error_that_names_its_index(dtype, bad, access, tmp_path):
    ids = np.resize(IDS, 130_000).astype(dtype)
    ids[6000] = bad  # where the fingerprint takes no sample
    path = write(tmp_path / "s.npy", ids, dtype)
    words = rf"s\.npy: expected token ids in 0\.\.[\d,]+, found {bad:,} at index 6,000$"
    for shuffle in ("global", "records"):
        with Loader(path, **{**SHAPE, "batch_size": 40}, shuffle=shuffle, access=access) as loader:
            is_refused(errors.ConvertError, lambda loader=loader: list(loader), match=words)
            loader.set_epoch(1)  # what was read before is not taken for proved
            is_refused(errors.ConvertError, lambda loader=loader: list(loader), match=words)
    with open_reader(path, batch_size=3, seq_len=50, access=access) as reader:
        is_refused(errors.ConvertError, lambda: reader[40], match=words)
        is_refused(errors.ConvertError, lambda: reader.read_record(120), match=words)
        is_refused(errors.ConvertError, lambda: reader.read_batch_torch(40), match=words)
        is_refused(errors.ConvertError, lambda: reader.read_batch_int32(40), match=words)
        assert len(reader[39]) == 3
    with open_corpus(path, access=access) as stream:
        is_refused(errors.ConvertError, lambda: stream.tokens[1000:7000], match=words)
        assert len(stream.tokens[6001:7000]) == 999


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4", "<i4", ">i4", "<i8"])
def test_batches_of_many_files_are_those_of_one(dtype, tmp_path):
    (tmp_path / "many").mkdir()
    for number, part in enumerate(np.split(IDS, [1, 700, 1333, 1340, 3000])):  # some batches lie in two files, or three
        write(tmp_path / "many" / f"{number}.npy", part, dtype)
    one = write(tmp_path / "one.npy", IDS, dtype)
    for how in ({}, {"dtype": torch.int32}, {"targets": True}, {"shuffle": ("block", 3)}):
        with Loader(one, **SHAPE, access="pread", prefetch=0, **how) as loader:
            expected = list(loader)
        for access in ("auto", "mmap", "pread"):
            with Loader(tmp_path / "many", **SHAPE, access=access, **how) as loader:
                for epoch in (0, 1, 0):
                    loader.set_epoch(epoch)
                    found = list(loader)
                pairs = zip(found, expected, strict=True)
                if "targets" in how:
                    assert all(torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in pairs)
                else:
                    assert all(torch.equal(x, a) for x, a in pairs)


def test_an_error_names_the_index_in_the_file_of_many(tmp_path):
    parts = np.split(IDS.copy(), [1000, 1100])
    parts[2][77] = -3
    for number, part in enumerate(parts):
        write(tmp_path / f"{number}.npy", part, "<i4")
    words = r"2\.npy: expected token ids in 0\.\.2,147,483,647, found -3 at index 77$"
    with open_reader(tmp_path, batch_size=3, seq_len=50) as reader:
        is_refused(errors.ConvertError, lambda: list(reader), match=words)
    with Loader(write_parts(tmp_path / "large"), **SHAPE) as loader:
        large = r"1\.npy: .* found -3 at index 6,000$"
        is_refused(errors.ConvertError, lambda: list(loader), match=large)
        loader.set_epoch(1)
        is_refused(errors.ConvertError, lambda: list(loader), match=large)
    with open_reader(tmp_path, batch_size=3, seq_len=50) as reader:
        is_refused(errors.ConvertError, lambda: reader.read_record(23), match=words)


def test_changes_of_a_mapped_batch_are_no_values_of_the_file(tmp_path):
    path = write(tmp_path / "s.npy", IDS, "<i4")
    with open_reader(path, batch_size=3, seq_len=50) as reader:
        reader.read_batch_int32(0)[0, :5] = -100
        assert reader.read_batch_int32(0)[0, :5].tolist() == [-100] * 5
        np.testing.assert_array_equal(reader[0].ravel(), IDS[:150])
