"""A stamped `.batch` file is read by HDF5, and stays the `.batch` file that it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from contract import check_closing, check_reader
from hypothesis import example, given
from hypothesis import strategies as st

import zb_hdf5.formats.dual
from examples import examples
from zb_hdf5 import (
    ArgumentError,
    BackendError,
    ChecksumError,
    Loader,
    UnavailableError,
    UnverifiableError,
    open_reader,
    verify_store,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert
from zb_hdf5.formats.batch_header import batch_file_bytes, pack_header
from zb_hdf5.formats.dual import build_face, check, stamp, unstamp
from zb_hdf5.formats.native import Face, face_of
from zb_hdf5.spec import CRC32_SUFFIX, StoreMeta, stored_dtype
from zb_hdf5.store.rebuild import add_crc32_file

WHOLE_PAGES, PADDED = (5, 2, 1024), (5, 3, 512)
DTYPES = ("uint16", "uint32")


def make(path, write_file, shape=WHOLE_PAGES, dtype="uint32"):
    return write_file(path, np.arange(np.prod(shape), dtype=dtype).reshape(shape))


@pytest.fixture(params=[WHOLE_PAGES, PADDED], ids=["whole pages", "padded"])
def path(tmp_path, write_file, request):
    make(tmp_path / "a.batch", write_file, request.param)
    return tmp_path / "a.batch"


def tokens_of(path, **options):
    with open_reader(path, **options) as reader:
        return np.stack(list(reader))


def run(*arguments, group=convert):
    return CliRunner().invoke(group, [str(argument) for argument in arguments], catch_exceptions=False)


def error_of(result, exit_code):
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


# --- both faces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ["mmap", "pread", "h5py"])
@pytest.mark.thin
def test_both_readers_give_the_same_batches(path, access):
    before = tokens_of(path)
    stamp(path)
    with open_reader(path, backend="hdf5", access=access) as reader, open_reader(path) as native:
        assert (reader.backend, native.backend) == ("hdf5", "batch")
        assert (reader.access, reader.meta, reader.fingerprint) == (access, native.meta, native.fingerprint)
        assert reader.extents == native.extents
        assert (reader.sha256, reader.complete, reader.stored_crc32()) == (None, True, None)
        check_reader(reader, before)
        check_closing(reader, before)
        np.testing.assert_array_equal(np.stack(list(native)), before)


def test_h5py_and_the_loader_read_it(path):
    before = tokens_of(path)
    stamp(path)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["batches"][:], before)
    with Loader(path, backend="hdf5", shuffle="sequential", rank=0, world_size=1) as loader:
        np.testing.assert_array_equal(np.stack([batch.numpy() for batch in loader]), before)


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="no h5dump")
def test_h5dump_reads_it(path):
    stamp(path)
    done = subprocess.run(["h5dump", "-y", "-d", "batches", path], capture_output=True, text=True, check=True)
    data = done.stdout.split("DATA {")[1].split("}")[0].replace(",", " ").split()
    np.testing.assert_array_equal(np.array(data, dtype=np.uint32), tokens_of(path).reshape(-1))


@examples(60)
@example(1, 1, 1024, "uint32")
@example(1, 4095, 1, "uint16")
@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([2**n for n in range(12)]), st.sampled_from(DTYPES))
def test_any_shape(write_file, num_batches, batch_size, seq_len, dtype):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.batch"
        make(path, write_file, (num_batches, batch_size, seq_len), dtype)
        before = path.read_bytes()
        stamp(path)
        check(path)
        for access in ("pread", "h5py"):
            found = tokens_of(path, backend="hdf5", access=access)
            np.testing.assert_array_equal(found, tokens_of(path, backend="batch"))
            assert found.dtype == np.dtype(dtype)
        assert path.read_bytes()[4096:] == before[4096:]
        unstamp(path)
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(before).digest()


def test_a_sparse_tebibyte_file_is_stamped(tmp_path):
    path, meta = tmp_path / "big.batch", StoreMeta(256, 1024, stored_dtype("uint32"))
    path.write_bytes(pack_header(meta, 2**20))
    os.truncate(path, batch_file_bytes(meta, 2**20))
    stamp(path)
    with h5py.File(path) as file, open_reader(path, backend="hdf5") as reader:
        assert file["batches"].shape == (2**20, 256, 1024)
        assert not file["batches"][2**20 - 1].any()
        assert reader.extents.offset(2**20 - 1) == 4096 + (2**20 - 1) * 2**20
    assert path.stat().st_blocks * 512 < 2**20


def test_the_face_says_what_the_header_says(tmp_path, write_file):
    path = tmp_path / "a.batch"
    write_file(path, np.zeros(WHOLE_PAGES, dtype=np.uint16), seed=2**32 - 1, total_records=2**32 - 1)
    stamp(path)
    check(path)
    with h5py.File(path) as file:
        assert file["batches"].attrs["token_count"] == np.prod(WHOLE_PAGES)
        assert (file.attrs["seed"], file.attrs["total_records"]) == (2**32 - 1, 2**32 - 1)


@pytest.mark.parametrize("shape", [(7, 3, 10), (1, 3, 1000)])
def test_slots_that_are_no_whole_records_are_refused(tmp_path, write_file, shape):
    make(tmp_path / "p.batch", write_file, shape)
    before = (tmp_path / "p.batch").read_bytes()
    with pytest.raises(ArgumentError, match="whole records"):
        stamp(tmp_path / "p.batch")
    assert (tmp_path / "p.batch").read_bytes() == before


# --- verify ----------------------------------------------------------------------------------------------------


def test_verify_batch_needs_the_crc32_file(path, write_file):
    stamp(path)
    with pytest.raises(BackendError, match=r"a\.batch\.crc32"):
        open_reader(path, backend="hdf5", verify="batch")
    with open_reader(path) as reader:
        crc32 = np.array([zb_crc32(batch) for batch in reader], dtype="<u4")
    path.with_name(path.name + CRC32_SUFFIX).write_bytes(crc32.tobytes())
    with open_reader(path, backend="hdf5", verify="batch") as reader:
        np.testing.assert_array_equal(reader.stored_crc32(), crc32)
        reader.read_batch(4)
    flip(path, path.stat().st_size - 4096)
    with open_reader(path, backend="hdf5", verify="batch") as reader, pytest.raises(ChecksumError, match="crc32"):
        reader.read_batch(4)


def zb_crc32(batch):
    return zlib.crc32(np.ascontiguousarray(batch))


def test_verify_store_digests_the_face(path):
    stamp(path)
    for backend in ("batch", "hdf5"):
        with pytest.raises(UnverifiableError, match=r"\.batch\.crc32 is not beside it"):
            open_reader(path, backend=backend, verify="store")
    add_crc32_file(path)
    with open_reader(path, verify="store") as native, open_reader(path, backend="hdf5", verify="store") as reader:
        assert reader.sha256 == native.sha256 is not None


def flip(path, at, mask=1):
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ mask]), at)


@pytest.mark.thin
def test_a_flipped_bit_is_found_or_does_not_matter(path, thinned):
    """Of every byte of the face: what HDF5 still reads is what the header says."""
    stamp(path)
    found, places = 0, thinned(range(512, 4096, 7))
    for at in places:
        flip(path, at)
        [report] = verify_store(path)
        if report.problem is None:
            np.testing.assert_array_equal(tokens_of(path, backend="hdf5"), tokens_of(path, backend="batch"))
        else:
            assert isinstance(report.problem, ChecksumError), report.problem
            found += 1
        flip(path, at)
    assert found > len(places) // 10
    assert verify_store(path)[0].problem is None


def test_zb_verify_exits_3_on_a_damaged_face(path):
    stamp(path)
    result = run("verify", path, "--json", group=zb)
    assert (result.exit_code, json.loads(result.stdout)["files"][0]["checks"]) == (
        6,
        ["face"],
    )  # a face says nothing of the tokens
    flip(path, 512 + 48)  # the superblock's checksum does not cover it: the root group's header
    result = run("verify", path, group=zb)
    assert result.exit_code == 3
    assert "--unstamp" in result.stdout


def test_a_face_that_contradicts_the_header_is_found(path):
    stamp(path)
    flip(path, 32)  # the header's seed: nothing of HDF5's
    with pytest.raises(ChecksumError, match="contradict"):
        check(path)
    assert run("verify", path, group=zb).exit_code == 3


@pytest.mark.parametrize("shape", [(6, 2, 1024), (7, 2, 1024), (5, 2, 1024), (3, 5, 512), (1, 4, 1024)])
def test_the_face_of_another_file_is_found(tmp_path, write_file, shape):
    make(tmp_path / "a.batch", write_file, shape)
    make(tmp_path / "b.batch", write_file, (3, 4, 1024))
    stamp(tmp_path / "a.batch")
    face = (tmp_path / "a.batch").read_bytes()[512:4096]
    with open(tmp_path / "b.batch", "r+b") as file:
        os.pwrite(file.fileno(), face, 512)
    with pytest.raises(ChecksumError, match=r"contradict|damaged"):
        check(tmp_path / "b.batch")


# --- interrupted -----------------------------------------------------------------------------------------------


@pytest.mark.thin
def test_every_prefix_of_the_writes_is_a_whole_batch_file(path, monkeypatch, thinned):
    before, tokens = path.read_bytes(), tokens_of(path)
    written = []
    monkeypatch.setattr(zb_hdf5.formats.dual, "write_fully", lambda fd, data, at: written.append((at, bytes(data))))
    stamp(path)
    monkeypatch.undo()
    states = list(prefixes(bytearray(before), written))
    stamp(path)
    assert states[-1] == path.read_bytes()
    monkeypatch.setattr(zb_hdf5.formats.dual, "write_fully", lambda fd, data, at: written.append((at, bytes(data))))
    written.clear()
    unstamp(path)
    monkeypatch.undo()
    states += prefixes(bytearray(states[-1]), written)
    assert states[-1] == before
    assert len(states) > 2 * 3584
    for state in thinned(states):
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), state[:4096], 0)
        assert face_of(path) is Face.HDF5 or not h5py.is_hdf5(path)
        with open_reader(path, access="pread") as reader:
            assert reader.backend == "batch"
            assert reader[4][-1, -1] == tokens[4, -1, -1]


def prefixes(state, written):
    for start, data in written:
        for at, byte in enumerate(data, start):
            state[at] = byte
            yield bytes(state)


def test_a_torn_stamp_is_told_and_removed_or_finished(path):
    before = path.read_bytes()
    stamp(path)
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), bytes(8), 512)
    assert face_of(path) is Face.TORN
    assert json.loads(run("info", path, "--json", group=zb).stdout)["face"] == "torn"
    assert "interrupted" in run("info", path, group=zb).stdout
    assert run("verify", path, group=zb).exit_code == 3
    torn = path.read_bytes()
    unstamp(path)
    assert path.read_bytes() == before
    path.write_bytes(torn)
    stamp(path)
    check(path)


@pytest.mark.thin
def test_a_killed_stamper_leaves_a_batch_file(path):
    before = path.read_bytes()
    code = (
        "import sys; from pathlib import Path; from zb_hdf5.formats.dual import stamp, unstamp\n"
        "path = Path(sys.argv[1])\n"
        "print('go', flush=True)\nwhile True:\n    stamp(path)\n    unstamp(path)\n"
    )
    for number in range(4):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(0.05 + 0.013 * number)
            child.send_signal(signal.SIGKILL)
        assert tokens_of(path)[4, -1, -1] == tokens_of(path).size - 1
        assert path.read_bytes()[:512] + bytes(3584) + path.read_bytes()[4096:] == before
        if face_of(path) is not Face.NONE:
            unstamp(path)
        assert path.read_bytes() == before


def test_a_locked_file_is_refused_and_a_mapped_one_is_not(path):
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match="lock"):
            stamp(path)
    with open_reader(path, access="mmap") as reader:
        stamp(path)
        assert reader[4][-1, -1] == reader[4].size * 5 - 1


def test_a_file_system_without_locks_is_told(path, monkeypatch):
    def refuse(*_):
        raise OSError(524, "unknown error 524")

    monkeypatch.setattr(zb_hdf5.formats.dual.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="no file locks"):
        stamp(path)
    assert face_of(path) is Face.HDF5


@pytest.mark.thin
def test_of_two_stampers_one_is_told(path):
    code = "import sys; from pathlib import Path; from zb_hdf5.formats.dual import stamp; stamp(Path(sys.argv[1]))"
    racers = [subprocess.Popen([sys.executable, "-c", code, path], stderr=subprocess.PIPE) for _ in range(3)]
    errors = [racer.communicate()[1].decode() for racer in racers]
    assert sorted(racer.returncode for racer in racers) == [0, 1, 1]
    assert all("already" in error or "lock" in error for error in errors if error)
    check(path)


# --- the commands ----------------------------------------------------------------------------------------------


def test_in_place_and_back(path):
    before = path.read_bytes()
    result = run("batch-to-hdf5", "--in-place", path, "--json")
    assert json.loads(result.stdout) == {"path": str(path), "face": "hdf5", "files": 1, "changed": 1}
    assert "both" in run("info", path, group=zb).stdout
    assert "stamped already" in error_of(run("batch-to-hdf5", "--in-place", path), 2)
    result = run("batch-to-hdf5", "--in-place", "--unstamp", path, "--quiet")
    assert (result.exit_code, result.stdout) == (0, "")
    assert path.read_bytes() == before
    assert "not stamped" in error_of(run("batch-to-hdf5", "--in-place", "--unstamp", path), 2)


def test_usage_errors(path, tmp_path):
    assert "takes no DST" in error_of(run("batch-to-hdf5", "--in-place", path, tmp_path / "out.h5"), 2)
    assert "takes no --shards" in error_of(run("batch-to-hdf5", "--in-place", path, "--shards", 3), 2)
    assert "--in-place" in error_of(run("batch-to-hdf5", path, "--unstamp"), 2)
    assert "DST" in error_of(run("batch-to-hdf5", path), 2)
    assert run("batch-to-hdf5", path, tmp_path / "out.h5").exit_code == 0
    assert "not a .batch file" in error_of(run("batch-to-hdf5", "--in-place", tmp_path / "out.h5"), 1)
    path.rename(tmp_path / "b.batch.partial")
    assert "not finished" in error_of(run("batch-to-hdf5", "--in-place", tmp_path / "b.batch.partial"), 2)
    assert "no such file" in error_of(run("batch-to-hdf5", "--in-place", tmp_path / "none.batch"), 2)


def test_a_store_is_stamped_and_goes_on_after_an_interruption(tmp_path, write_store):
    tokens = np.arange(7 * 2 * 1024, dtype=np.uint32).reshape(7, 2, 1024)
    store = write_store(tmp_path / "store", tokens, cuts=(3, 5), backends=("batch",))
    before = {file.name: file.read_bytes() for file in store.iterdir()}
    stamp(store / "shard-00001.batch")
    result = run("batch-to-hdf5", "--in-place", store, "--json")
    assert json.loads(result.stdout)["changed"] == 2
    result = run("verify", store, "--json", group=zb)
    assert [file["checks"] for file in json.loads(result.stdout)["files"]] == [["crc32", "face", "index"]] * 3
    np.testing.assert_array_equal(tokens_of(store), tokens)
    with open_reader(store / "shard-00001.batch", backend="hdf5", verify="batch") as reader:
        np.testing.assert_array_equal(reader[0], tokens[3])
    flip(store / "shard-00002.batch", 600)
    assert run("verify", store, group=zb).exit_code == 3
    assert run("batch-to-hdf5", "--in-place", "--unstamp", store).exit_code == 0
    assert {file.name: file.read_bytes() for file in store.iterdir()} == before


def test_a_store_with_hdf5_shards_is_refused(tmp_path, write_store):
    tokens = np.arange(4 * 2 * 1024, dtype=np.uint32).reshape(4, 2, 1024)
    store = write_store(tmp_path / "store", tokens, cuts=(2,), backends=("batch", "hdf5"))
    assert "'hdf5'" in error_of(run("batch-to-hdf5", "--in-place", store), 2)
    assert face_of(store / "shard-00000.batch") is Face.NONE


SHAPE = ("--batch-size", "3", "--seq-len", "512")


@pytest.fixture
def npy(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(21 * 512, dtype=np.uint32).reshape(21, 512))
    return tmp_path / "in.npy"


@pytest.mark.parametrize("name", ["out.batch", "store"])
def test_a_dual_conversion_is_a_conversion_and_a_stamp(npy, tmp_path, name):
    dual, plain = tmp_path / "dual" / name, tmp_path / "plain" / name
    for target, options in ((dual, ["--dual"]), (plain, [])):
        target.parent.mkdir()
        options = [*options, *([] if target.suffix else ["--shards", 3])]
        assert run("npy-to-batch", npy, target, *SHAPE, *options).exit_code == 0
    assert run("verify", dual, group=zb).exit_code == (6 if target.suffix else 0)  # a lone .batch has no digests
    assert run("batch-to-hdf5", "--in-place", plain).exit_code == 0
    assert content(dual) == content(plain)


def content(path):
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_a_dual_conversion_that_hdf5_cannot_describe_is_refused_at_once(npy, tmp_path):
    np.save(npy, np.arange(9000, dtype=np.uint32))
    for option in (["--quiet"], ["--dry-run"]):
        arguments = ("--batch-size", 3, "--seq-len", 500, "--dual", *option)
        assert "whole records" in error_of(run("npy-to-batch", npy, tmp_path / "out", *arguments), 2)
    assert os.listdir(tmp_path) == ["in.npy"]


def test_a_resumed_dual_conversion_writes_a_damaged_face_again(npy, tmp_path):
    whole = tmp_path / "whole"
    arguments = (*SHAPE, "--shards", 3, "--dual")
    assert run("npy-to-batch", npy, whole, *arguments).exit_code == 0
    for job in range(2):
        assert run("npy-to-batch", npy, tmp_path / "out", *arguments, "--shard-range", f"{job}/3").exit_code == 0
    flip(tmp_path / "out.partial" / "shard-00000-of-00003.batch", 600)
    assert "another" in error_of(run("npy-to-batch", npy, tmp_path / "out", *arguments[:-1], "--resume"), 1)
    assert run("npy-to-batch", npy, tmp_path / "out", *arguments, "--resume").exit_code == 0
    assert content(tmp_path / "out") == content(whole)


def test_a_pebibyte_has_a_face():
    assert len(build_face(StoreMeta(256, 1024, stored_dtype("uint32")), 2**30, Path("x"))) == 3584


def test_the_largest_batches_are_refused_or_described():
    with pytest.raises(ArgumentError, match="whole records"):
        build_face(StoreMeta(2**22 - 1, 256, stored_dtype("uint32")), 1, Path("x"))
    assert build_face(StoreMeta(2**20 - 1, 1024, stored_dtype("uint32")), 1, Path("x"))


def test_zb_verify_of_a_damaged_magic_fails(path):
    stamp(path)
    flip(path, 0)
    with open_reader(path) as reader:
        assert reader.backend == "hdf5"  # what is left of it
    assert "not a .batch file" in run("verify", path, group=zb).stdout
    assert run("verify", path, group=zb).exit_code == 3


def test_the_other_commands_take_a_stamped_file(path, tmp_path):
    before = tokens_of(path)
    stamp(path)
    assert run("hdf5-to-npy", path, tmp_path / "a.npy").exit_code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy").reshape(before.shape), before)
    assert run("hdf5-to-batch", path, tmp_path / "b.batch", "--dual").exit_code == 0
    assert (tmp_path / "b.batch").read_bytes() == path.read_bytes()
    assert run("doctor", path, group=zb).exit_code == 0
    os.truncate(path, path.stat().st_size - 1)
    run("repair", path, "--output", tmp_path / "c.batch", group=zb)
    assert face_of(tmp_path / "c.batch") is Face.NONE
    np.testing.assert_array_equal(tokens_of(tmp_path / "c.batch"), before[:4])
