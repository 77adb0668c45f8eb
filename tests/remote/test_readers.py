"""Readers of objects: the same contract as any reader, few requests, and one object only."""

import os
import pickle
import shutil
import time
from functools import partial

import h5py
import numpy as np
import pytest
from contents import batches_of, measured, write_batches, write_streams
from contract import check_reader, is_refused, random_tokens, read_records

from zb_hdf5 import FollowingLoader, Loader, ReadAs, errors, open_reader, open_writer, verify_store
from zb_hdf5.files.objects import BLOCK_BYTES, PART_BYTES, RemoteObject
from zb_hdf5.files.paths import any_path, open_file
from zb_hdf5.files.tokens import Wait


def write_documents(folder, tokens, shards=2):
    """Write a store of streams of documents of 50 tokens."""
    parts = [(part, np.diff([*range(0, len(part), 50), len(part)])) for part in np.array_split(tokens, shards)]
    return write_streams(folder, parts, dtype="uint16", chunk_tokens=64)


@pytest.mark.parametrize("backend", ["hdf5", "batch"])
def test_a_store_behind_http_is_read_and_measured_as_any_other(served, write_store, tokens, backend):
    write_store(served.folder / "store", tokens, (2, 5), (backend,))
    with open_reader(f"{served.url}/store") as reader:
        check_reader(reader, tokens)
    for path in (f"{served.url}/store", any_path(f"{served.url}/store")):
        assert measured(path).num_tokens == tokens.size


def test_a_store_in_a_bucket_is_read_as_any_other(s3, upload, tmp_path, write_store, tokens):
    with open_reader(upload(write_store(tmp_path / "store", tokens, (4,)), "s3://bucket/a/store")) as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
        np.testing.assert_array_equal(reader.read_record(17), tokens[5, 2])
        assert str(reader.path) == "s3://bucket/a/store"


@pytest.mark.parametrize("suffix", [".h5", ".batch"])
def test_a_lone_file_is_read_as_any_other(served, tokens, suffix, write_file):
    fields = {"mask": (tokens % 3).astype(np.uint8)} if suffix == ".h5" else {}
    write_batches(served.folder / f"lone{suffix}", tokens, fields or None, fields=dict.fromkeys(fields, "u1") or None)
    with open_reader(f"{served.url}/lone{suffix}") as reader:
        check_reader(reader, tokens, fields)


def test_opening_costs_one_read_of_the_index_and_the_first_batch_one_round_more(web, write_store, tokens):
    write_store(web.folder / "store", tokens, (3,))
    with Loader(f"{web.url}/store", shuffle="sequential", prefetch=0) as loader:
        assert web.requests == [("GET", "shards.json", f"bytes=0-{PART_BYTES - 1}")]
        np.testing.assert_array_equal(next(loader), tokens[0])
        assert len(web.requests) == 3  # the rows of crc32 and the batch, at the same time
        np.testing.assert_array_equal(next(loader), tokens[1])
        assert len(web.requests) == 4
    assert {method for method, *_ in web.requests} == {"GET"}


def test_opening_windows_of_a_stream_costs_one_read_of_the_index(web):
    stream = np.arange(2000, dtype=np.uint16)
    local = write_documents(web.folder / "stream", stream)
    how = {"batch_size": 4, "seq_len": 16, "targets": True}
    with Loader(f"{web.url}/stream", prefetch=0, **how) as loader, Loader(local, **how) as expected:
        assert web.requests == [("GET", "shards.json", f"bytes=0-{PART_BYTES - 1}")]
        for (x, y), (a, b) in zip(loader, expected, strict=True):
            np.testing.assert_array_equal(x, a)
            np.testing.assert_array_equal(y, b)
        assert loader.state_dict() == expected.state_dict()


def test_windows_that_follow_each_other_are_one_request(web):
    write_documents(web.folder / "stream", np.arange(2000, dtype=np.uint16), shards=1)
    with open_reader(f"{web.url}/stream", batch_size=4, seq_len=16, overlap=1) as reader:
        reader.read_batch(0)
        web.reset()
        np.testing.assert_array_equal(reader.read_batch(1)[:, 0], [64, 80, 96, 112])
        assert len(web.requests) == 1


def test_an_hdf5_file_without_an_index_is_looked_at_in_few_reads(web, write_file):
    write_file(web.folder / "lone.h5", random_tokens(500, 4, 64))
    with open_reader(f"{web.url}/lone.h5"):
        assert sum(method == "GET" for method, *_ in web.requests) <= 3


def test_every_kind_of_store_can_be_verified(web, write_store, tokens):
    write_store(web.folder / "store", tokens, (3,), ("hdf5", "batch"))
    write_documents(web.folder / "stream", np.arange(2000, dtype=np.uint16))
    for name in ("store", "stream", "store/shard-00000.h5"):
        reports = verify_store(f"{web.url}/{name}")
        assert reports
        assert all(report.problem is None and report.checks for report in reports)
        assert reports[0].path.startswith(web.url)


def test_an_object_is_read_by_merged_ranges_in_any_order(web):
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    (web.folder / "data.batch").write_bytes(data.tobytes())
    source = RemoteObject(f"{web.url}/data.batch")
    places = [(900, 100), (0, 10), (1000, 50), (9_990, 10), (1020, 80), (5, 10)]
    arrays = [np.zeros(count, np.uint8) for _, count in places]
    source.read_ranges([(start, out) for (start, _), out in zip(places, arrays, strict=True)])
    for (start, count), out in zip(places, arrays, strict=True):
        np.testing.assert_array_equal(out, data[start : start + count])
    assert sorted(span for *_, span in web.requests) == ["bytes=0-14", "bytes=900-1099", "bytes=9990-9999"]
    assert source.num_bytes == len(data)
    assert len(web.requests) == 3  # the size came along
    is_refused(errors.IncompleteError, lambda: source.read(9_990, 10_001), match="expected bytes 9,990 to 10,001")
    source.close()


def test_a_copy_and_a_forked_process_read_the_same_object_and_refuse_another(web):
    (web.folder / "data.batch").write_bytes(bytes(range(200)))
    source = RemoteObject(f"{web.url}/data.batch")
    assert bytes(source.read(3, 6)) == b"\3\4\5"
    for _ in range(2):
        if not (child := os.fork()):
            right = bytes(source.read(7, 9)) == b"\7\10"
            if not (grandchild := os.fork()):
                os._exit(bytes(source.read(8, 10)) != b"\10\11")
            os._exit(not right or os.waitpid(grandchild, 0)[1])
        assert os.waitpid(child, 0)[1] == 0
    assert bytes(source.read(0, 1)) == b"\0"  # the parent's own connections are whole
    copy = pickle.loads(pickle.dumps(source))
    (web.folder / "data.batch").write_bytes(bytes(201))
    for each in (source, copy):
        is_refused(errors.FormatError, lambda each=each: each.read(3, 6), match="changed since it was opened")
        each.close()


def test_a_file_of_an_object_reads_blocks(web):
    data = np.random.default_rng(1).bytes(2 * BLOCK_BYTES + 100)
    (web.folder / "data.batch").write_bytes(data)
    with open_file(any_path(f"{web.url}/data.batch")) as file:
        assert file.read(10) == data[:10]
        file.seek(BLOCK_BYTES - 5)
        assert file.read(10) == data[BLOCK_BYTES - 5 : BLOCK_BYTES + 5]
        assert len(web.requests) == 2
        assert file.seek(-50, os.SEEK_END) == len(data) - 50
        assert file.read(100) == data[-50:]
        file.seek(1)
        assert file.read(BLOCK_BYTES + 1) == data[1 : BLOCK_BYTES + 2]  # past the blocks


@pytest.mark.parametrize("url", ["ftp://host/store", "https://host/store?signature=1", "s3://"])
def test_a_url_of_another_kind_is_refused(url):
    is_refused(errors.ArgumentError, lambda: open_reader(url), match="expected")


def test_calls_that_need_a_file_of_this_machine_are_refused(web, write_store, tokens):
    write_store(web.folder / "store", tokens)
    url = f"{web.url}/store"
    is_refused(errors.BackendError, lambda: open_reader(url, access="mmap"), match="needs a file of this machine")
    write = partial(open_writer, f"{url}/new.h5", batch_size=2, seq_len=4)
    is_refused(errors.ArgumentError, lambda: FollowingLoader(url, timeout_s=1), write, match="is a URL")
    assert not web.requests


def test_a_store_that_grows_is_refused(web, tokens):
    with open_writer(web.folder / "store", batch_size=3, seq_len=10, live=True, shard_batches=3) as writer:
        writer.write(tokens[:4])
        is_refused(errors.IncompleteError, lambda: open_reader(f"{web.url}/store"), match="is still written")
    shutil.rmtree(web.folder / "store")


def test_after_an_error_nothing_is_written_to_the_arrays_of_the_caller(web):
    (web.folder / "data.batch").write_bytes(bytes(range(1, 201)) * 50_000)
    source = RemoteObject(f"{web.url}/data.batch")
    assert source.num_bytes == 10_000_000
    web.fault = lambda number, method, name, span: {"status": 403} if span.startswith("bytes=0-") else {"wait": 0.3}
    out = [np.zeros(10, np.uint8) for _ in range(2)]
    is_refused(errors.UnavailableError, lambda: source.read_ranges([(0, out[0]), (9_000_000, out[1])]), match="denied")
    out[1][:] = 0
    time.sleep(0.5)
    assert not out[1].any()


def test_many_ranges_of_one_object_are_read_together(web):
    data = np.random.default_rng(0).integers(0, 256, 50_000).astype(np.uint8)
    (web.folder / "x.bin").write_bytes(data.tobytes())
    source = RemoteObject(f"{web.url}/x.bin")
    offsets = np.random.default_rng(1).permutation(100) * 500
    out = np.zeros((100, 200), np.uint8)
    expected = np.stack([data[offset : offset + 200] for offset in offsets])
    runs = list(zip(offsets.tolist(), out, strict=True))
    for fault in ({"status": 503}, {"cut": 7}, {"hang_up": True}, None):
        seen = set()

        def sometimes(number, method, name, span, fault=fault, seen=seen):
            again = span in seen
            seen.add(span)
            return None if again or number % 3 else fault

        out[...] = 0
        web.fault = sometimes
        source.read_ranges(runs)
        np.testing.assert_array_equal(out, expected)
    (web.folder / "x.bin").write_bytes(data[::-1].tobytes())
    os.utime(web.folder / "x.bin", (0, 0))
    is_refused(errors.FormatError, lambda: source.read_ranges(runs), match="changed since it was opened")
    source.close()


TOKENS = np.random.default_rng(4).choice(np.arange(0, 60_000, 1500), (30, 8, 64)).astype("<u2")


@pytest.mark.parametrize("codec", ["zstd", "gzip"])
def test_a_store_is_read_without_hdf5(codec, served, write_store, monkeypatch, tmp_path):
    write_store(served.folder / "z", TOKENS, (7, 20), codec=codec)
    assert {report.outcome for report in verify_store(f"{served.url}/z")} == {"verified"}
    with pytest.raises(errors.BackendError, match="needs a file of this machine"):
        open_reader(f"{served.url}/z", access="mmap")
    monkeypatch.setattr(h5py, "File", None)
    with open_reader(f"{served.url}/z", verify="batch") as reader:
        assert reader.tokens.wait is Wait.FAR
        np.testing.assert_array_equal(np.stack(list(reader)), TOKENS)
        rows = np.random.default_rng(0).permutation(240)[:40]
        np.testing.assert_array_equal(read_records(reader, rows), TOKENS.reshape(-1, 64)[rows])
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        with Loader(f"{served.url}/z", shuffle="sequential", rank=0, world_size=1, cache=cache) as loader:
            np.testing.assert_array_equal(np.stack([batch.numpy() for batch in loader]), TOKENS)


def test_lone_files_and_streams_are_read(served, write_file):
    write_file(served.folder / "x.h5", TOKENS, codec="zstd")
    np.testing.assert_array_equal(batches_of(f"{served.url}/x.h5"), TOKENS)
    flat = TOKENS.reshape(-1)
    write_streams(served.folder / "s", np.split(flat, [5000]), chunk_tokens=512, codec="gzip")
    for name in ("s", "s/shard-00000.h5"):
        with open_reader(f"{served.url}/{name}", batch_size=3, seq_len=50) as reader:
            found = np.concatenate(list(reader)).reshape(-1)
            np.testing.assert_array_equal(found, flat[: len(found)])


def test_a_file_of_another_program_is_read_and_its_masks_are_refused_behind_a_url(served, tokens):
    with h5py.File(served.folder / "ids.h5", "w") as h5:
        h5.create_dataset(
            "ids", data=tokens.reshape(-1, tokens.shape[2]), chunks=(2, tokens.shape[2]), compression="gzip"
        )
    with open_reader(f"{served.url}/ids.h5") as reader:
        np.testing.assert_array_equal(np.concatenate(list(reader)), tokens.reshape(-1, tokens.shape[2]))
    channels = np.stack([tokens[:, 0], np.ones_like(tokens[:, 0]), tokens[:, 1]], axis=1)
    with h5py.File(served.folder / "masks.h5", "w") as h5:
        h5["data"] = channels
    url = f"{served.url}/masks.h5"
    is_refused(errors.FormatError, lambda: open_reader(url), lambda: Loader(url), match="found 3 entries")
    np.testing.assert_array_equal(batches_of(url, read_as=ReadAs(axes="batch,record,token")), channels)


def test_a_mistake_in_a_url_is_told_from_an_index_that_was_lost(s3, served, upload, tmp_path, write_store, tokens):
    folder = write_store(tmp_path / "train", tokens, (4,))
    upload(folder, "s3://bucket/data/train")
    (folder / "shards.json").unlink()
    upload(folder, "s3://bucket/lost/train")
    shutil.copytree(folder, served.folder / "lost")
    with open_reader("s3://bucket/data/train") as reader:
        assert len(reader) == len(tokens)
    for url, expected in (
        ("s3://bucket/data/trian", "no shards.json, and nothing else: look for a mistake in the URL"),
        ("s3://bucket/dat", ".* look for a mistake in the URL"),
        ("s3://bucket/data", "no shards.json and no shards: not a store, but train/"),
        ("s3://bucket/lost/train", "no shards.json: its index was lost; restore the index, or rebuild it .*"),
        (f"{served.url}/trian", "no shards.json: the URL has a mistake, or the index was lost"),
        (f"{served.url}/lost", ".* or the index was lost"),
    ):
        is_refused(
            errors.FormatError,
            lambda url=url: open_reader(url),
            lambda url=url: Loader(url, rank=0, world_size=1),
            match=f"^{url}: {expected}$",
        )
