"""`zb doctor`: each finding says what is, and a problem is what would stop training."""

import errno
import fcntl
import json

import pytest
from commandline import run_zb

from zb_hdf5 import UnavailableError, open_writer


def doctor(path, code=0):
    result = run_zb("doctor", path, "--json")
    assert result.exit_code == code, result.stderr
    return {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_a_faster_access_is_named(tmp_path, tokens, write_file, monkeypatch):
    path = write_file(tmp_path / "x.h5", tokens).path
    times_s = {"auto": 1.0, "mmap": 2.0, "pread": 0.9}
    monkeypatch.setattr("zb_hdf5.commands.doctor._pass_s", lambda path, access, steps: times_s[access])
    assert doctor(path)["reads"]["state"] == "ok"
    times_s["pread"] = 0.8
    assert doctor(path)["reads"]["remedy"] == "access='pread' is faster here by a fifth and more"


def test_a_store_whose_first_shard_grows_is_looked_at(tmp_path, tokens):
    options = {"batch_size": 3, "seq_len": 10, "dtype": "uint32", "live": True, "shard_batches": 9}
    with open_writer(tmp_path / "s", **options) as writer:
        writer.write(tokens)
        assert "problem" not in {finding["state"] for finding in doctor(tmp_path / "s").values()}
        writer.finish()
    assert "of 1 shards" in doctor(tmp_path / "s")["open files"]["text"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, 524, errno.EIO])
def test_missing_locks_are_noted(number, tmp_path, tokens, write_file, monkeypatch):
    path = write_file(tmp_path / "x.batch", tokens).path

    def refuse(*_):
        raise OSError(number, "x")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert doctor(path)["locks"]["state"] == "note"
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    assert doctor(path, 5)["locks"]["state"] == "problem"


def test_a_missing_filter_is_a_problem(tmp_path, tokens, write_file, gzip_copy, monkeypatch):
    path = gzip_copy(write_file(tmp_path / "x.h5", tokens).path, tmp_path / "z.h5")
    assert doctor(path)["layout"]["state"] == "ok"

    def refuse(reader, index):
        raise UnavailableError("a filter is missing")

    monkeypatch.setattr("zb_hdf5.formats.hdf5.h5_reader.HDF5Reader.read_batch", refuse)
    assert doctor(path, 5)["filters"]["state"] == "problem"
