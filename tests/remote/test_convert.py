"""Conversions from and to buckets, and the commands that look at them."""

import signal
from pathlib import Path

import numpy as np
import pytest
from commandline import report_of, run_zb, succeed
from contents import batches_of, write_batches
from contract import is_refused, random_tokens
from interpreter import start_program
from processes import running

import zb_hdf5
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.resolution import staging_path
from zb_hdf5.files.paths import RemotePath

TOKENS = random_tokens(9, 3, 32)


@pytest.fixture
def local(tmp_path, write_store, monkeypatch):
    """Return a store of this machine; the current folder is empty, and elsewhere."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return write_store(tmp_path / "local", TOKENS, (4,))


def test_a_store_goes_to_a_bucket_and_comes_back(s3, local, tmp_path):
    url = "s3://bucket/stores/train-h5"
    assert report_of(zb, "convert", "hdf5-to-batch", local, url, "--shards", 3)["path"] == url
    names = [name for method, name, _ in s3.requests if method in ("PUT", "POST")]
    assert names[-1] == "shards.json"
    assert len({name for name in names if name.endswith(".batch")}) == 3
    assert not list(Path.cwd().iterdir())
    np.testing.assert_array_equal(batches_of(url), TOKENS)
    assert run_zb("verify", url).exit_code == 0
    described = report_of(zb, "info", url)
    assert (described["path"], described["num_batches"], described["file_system"]) == (url, 9, "objects")
    assert "ranged reads of objects" in run_zb("info", url).stdout
    assert described["access"] == "remote"
    report = zb_hdf5.convert(url, "hdf5", tmp_path / "back", dtype="uint32")
    with zb_hdf5.open_reader(tmp_path / "back") as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), TOKENS)
        assert reader.corpus.sha256 == report.sha256


def test_a_store_behind_http_is_converted_looked_at_and_verified(web, local, tmp_path, write_store):
    write_store(web.folder / "store", TOKENS, (4,))
    url = f"{web.url}/store"
    succeed(zb, "convert", "hdf5-to-npy", url, tmp_path / "records.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "records.npy").reshape(TOKENS.shape), TOKENS)
    assert "2 of 2 files" in run_zb("verify", url).stdout
    assert url in run_zb("info", f"{url}/shard-00000.h5").stdout
    assert run_zb("show", url, "--batch", "2").exit_code == 0
    assert run_zb("which", url, "--batch", "1").exit_code == 0


def test_nothing_is_overwritten_and_force_makes_new_objects(s3, local, tmp_path, write_store):
    url = "s3://bucket/store"
    zb_hdf5.convert(local, "hdf5", url)
    old = set(zb_hdf5.ShardIndex.load(url).table.values["path"])
    is_refused(zb_hdf5.ExistsError, lambda: zb_hdf5.convert(local, "batch", url), match=r"has a shards.json already")
    s3.reset()
    other = write_store(tmp_path / "other", TOKENS + 1, (4,))
    zb_hdf5.convert(other, "hdf5", url, force=True)
    assert old.isdisjoint(zb_hdf5.ShardIndex.load(url).table.values["path"])
    changes = [(method, name) for method, name, _ in s3.requests if method in ("POST", "PUT")]
    assert changes[-2] == ("PUT", "shards.json")
    assert changes[-1][0] == "POST"  # how S3 deletes: the old objects, when nothing names them any more
    with zb_hdf5.open_reader(url) as reader:
        np.testing.assert_array_equal(reader[8], TOKENS[8] + 1)
    is_refused(OSError, lambda: zb_hdf5.open_reader(f"{url}/{sorted(old)[0]}")[0], match="no such object")


def test_a_codec_compresses_what_is_uploaded(s3, local):
    url = "s3://bucket/small"
    zb_hdf5.convert(local, "hdf5", url)  # of the same tokens: its objects are other ones
    succeed(zb, "convert", "hdf5-to-hdf5", local, url, "--codec", "gzip:3", "--force")
    assert {shard.compressed and shard.compressed.codec for shard in zb_hdf5.ShardIndex.load(url).shards} == {"gzip:3"}
    np.testing.assert_array_equal(batches_of(url), TOKENS)


def test_a_dry_run_says_what_would_be_uploaded(s3, local):
    url = "s3://bucket/store"
    planned = report_of(zb, "convert", "hdf5-to-batch", local, url, "--dry-run")
    assert (planned["path"], planned["num_shards"]) == (url, 2)
    assert planned["free"]["bytes"] > 0  # of the folder from which it is uploaded
    assert not list(Path.cwd().iterdir())
    assert run_zb("convert", "hdf5-to-batch", local, "s3://bucket/a.batch", "--dry-run").exit_code == 2
    staging = staging_path(RemotePath(url))
    staging.mkdir()
    again = run_zb("convert", "hdf5-to-batch", local, url, "--dry-run")
    assert (again.exit_code, f"an interrupted upload of it is in {staging}; go on with --resume" in again.stderr) == (
        1,
        True,
    )
    staging.rmdir()
    zb_hdf5.convert(local, "batch", url)
    again = run_zb("convert", "hdf5-to-batch", local, url, "--dry-run", "--resume")
    assert (again.exit_code, "has a shards.json already" in again.stderr) == (1, True)
    assert run_zb("convert", "hdf5-to-batch", local, url, "--dry-run", "--force").exit_code == 0


def test_a_bucket_that_does_not_exist_is_found_before_anything_is_written(s3, local):
    s3.fault = lambda number, method, name, span: {"status": 404}  # a listing has no other answer
    missing = lambda: zb_hdf5.convert(local, "hdf5", "s3://bucket/store")  # noqa: E731
    is_refused(zb_hdf5.UnavailableError, missing, match="its bucket does not exist")
    assert not list(Path.cwd().iterdir())


def test_an_interrupted_upload_goes_on(s3, local):
    url = "s3://bucket/store"
    s3.fault = lambda number, method, name, span: {"status": 403} if "shard-00001" in name else None
    is_refused(zb_hdf5.UnavailableError, lambda: zb_hdf5.convert(local, "hdf5", url), match="access denied")
    s3.reset()
    is_refused(zb_hdf5.FormatError, lambda: zb_hdf5.open_reader(url), match=r"no shards.json")
    is_refused(zb_hdf5.ExistsError, lambda: zb_hdf5.convert(local, "hdf5", url), match=r"store-\w{8}\.upload")
    zb_hdf5.convert(local, "hdf5", url, resume=True)
    put = [name.split(".")[0] for method, name, _ in s3.requests if method == "PUT"]
    assert put == ["shard-00001-of-00002", "shards"]
    np.testing.assert_array_equal(batches_of(url), TOKENS)
    assert not list(Path.cwd().iterdir())


def test_a_store_is_written_to_a_folder_of_a_bucket_only(s3, web, local):
    with pytest.raises(zb_hdf5.ArgumentError, match="expected a folder in a bucket"):
        zb_hdf5.convert(local, "hdf5", f"{web.url}/store")
    with pytest.raises(zb_hdf5.ArgumentError, match="expected a folder in a bucket"):
        zb_hdf5.convert(local, "hdf5", "s3://bucket/one.h5")
    with pytest.raises(zb_hdf5.ConvertError, match="parts are merged on one machine"):
        zb_hdf5.convert(local, "hdf5", "s3://bucket/store", shard_range=(0, 2))


def test_a_command_that_needs_a_file_of_this_machine_refuses_a_url(s3):
    result = run_zb("repair", "s3://bucket/store")
    assert result.exit_code == 2
    assert "is a URL" in result.output


def test_the_same_tokens_with_other_fields_are_new_objects(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (1, 2):
        path = tmp_path / f"{value}.h5"
        write_batches(path, TOKENS, {"mask": np.full(TOKENS.shape, value)}, fields={"mask": "u1"})
        zb_hdf5.convert(path, "hdf5", "s3://bucket/store", shards=2, force=True)
    with zb_hdf5.open_reader("s3://bucket/store") as reader:
        assert (reader.field("mask").read_batch(0) == 2).all()
    assert all(report.problem is None for report in zb_hdf5.verify_store("s3://bucket/store"))


def test_sigterm_ends_a_conversion_from_a_server_that_does_not_answer(web, local, tmp_path, write_store):
    write_store(web.folder / "store", TOKENS, (4,))
    asked = []

    def hold_up(number, method, name, span):
        if name == "shard-00001.h5" and not asked:
            asked.append(name)
            process.send_signal(signal.SIGTERM)
            process.wait(60)  # the answer comes when it has ended

    command = ("convert", "hdf5-to-hdf5", f"{web.url}/store", tmp_path / "out", "--quiet", "--workers", 1)
    with running(start_program("from zb_hdf5.__main__ import zb; zb()", *command)) as process:
        web.fault = hold_up
        _, said = process.communicate(timeout=100)
    assert (process.returncode, len(asked)) == (143, 1), said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
