"""Field sets in a bucket: uploaded, found with their store, and read by ranges; or beside a store of this machine."""

import shutil

import numpy as np
import obstore
import pytest
from commandline import one_error, report_of, run_zb, succeed

from zb_hdf5 import ChecksumError, ConvertError, IncompleteError, Loader, convert, open_corpus, open_field_set
from zb_hdf5.commands.zb import zb
from zb_hdf5.field_sets import set_upkeep
from zb_hdf5.files.objects import put_object
from zb_hdf5.files.paths import RemotePath

URL = "s3://bucket/stores/train-h5"
SETS = f"{URL}/fields/t/train"


@pytest.fixture
def with_set(s3, tmp_path):
    """A store of this machine with a finished set; its tokens are in the bucket."""
    np.save(tmp_path / "t.npy", np.arange(64 * 16, dtype=np.uint16).reshape(64, 16))
    convert(tmp_path / "t.npy", "hdf5", tmp_path / "st", batch_size=4, shards=2)
    convert(tmp_path / "st", "hdf5", URL)
    with open_field_set(tmp_path / "st", "t", {"w": ("i4", (3,))}, part_bytes=4000) as found:
        for step in found.missing(batch_size=8, quiet=True):
            found.write(
                step["records"], w=np.asarray(step["tokens"])[..., None].astype("i4") * 3 + np.arange(3, dtype="i4")
            )
        found.finish()
    return tmp_path / "st"


def require_values(source, **options):
    count = 0
    with Loader(source, fields=["t/w"], **options) as loader:
        for step in loader:
            np.testing.assert_array_equal(step["t/w"], step["tokens"].numpy()[..., None] * 3 + np.arange(3))
            count += len(step["tokens"])
    assert count == 64


def test_a_set_goes_to_a_bucket_and_is_read_there(with_set):
    found = report_of(zb, "fields", "upload", with_set, "t", SETS)
    assert found == {"url": SETS, "num_bytes": found["num_bytes"]}
    assert found["num_bytes"] > 64 * 16 * 12
    assert report_of(zb, "fields", "upload", with_set, "t", SETS)["num_bytes"] < 4000  # facts and index alone
    for shuffle in ("global", "records"):
        require_values(URL, shuffle=shuffle)
    with open_corpus(with_set) as corpus:
        require_values(corpus.with_fields("t", path=SETS))
    with open_corpus(URL) as corpus:
        require_values(corpus.with_fields("t", path=with_set / "fields/t/train"))


def rewrite(store, records, add):
    """Write the values of some records once more, each greater by a number."""
    with open_field_set(store, "t") as found:
        for step in found.missing(batch_size=8, overwrite=records, quiet=True):
            right = np.asarray(step["tokens"])[..., None].astype("i4") * 3 + np.arange(3, dtype="i4")
            found.write(step["records"], w=right + np.int32(add))
        found.finish()


def test_a_set_that_was_written_once_more_replaces_its_parts_in_a_bucket(with_set, monkeypatch):
    rewrite(with_set, (0, 64), add=1)
    whole = report_of(zb, "fields", "upload", with_set, "t", SETS)["num_bytes"]
    with pytest.raises(AssertionError):
        require_values(URL)
    rewrite(with_set, (0, 24), add=0)

    def fails(url, content, **options):
        if url.endswith("index.json"):
            raise OSError("the connection is gone")
        put_object(url, content, **options)

    with monkeypatch.context() as patched:
        patched.setattr(set_upkeep, "put_object", fails)
        assert "connection is gone" in one_error(run_zb("fields", "upload", with_set, "t", SETS))
    with pytest.raises(IncompleteError, match="it is not finished"):
        require_values(URL)
    rewrite(with_set, (24, 64), add=0)  # and the first upload of these is not taken for a part of the next one
    assert report_of(zb, "fields", "upload", with_set, "t", SETS)["num_bytes"] > whole // 2
    require_values(URL, shuffle="records")
    assert report_of(zb, "fields", "upload", with_set, "t", SETS)["num_bytes"] < 4000


def test_an_upload_that_ended_early_sends_what_is_left(with_set, monkeypatch):
    sent = []

    def fails(url, content, **options):
        if len(sent) == 3:
            raise OSError("the connection is gone")
        sent.append(url)
        put_object(url, content, **options)

    with monkeypatch.context() as patched:
        patched.setattr(set_upkeep, "put_object", fails)
        assert "connection is gone" in one_error(run_zb("fields", "upload", with_set, "t", SETS))
    report = report_of(zb, "fields", "upload", with_set, "t", SETS)
    parts = sum(path.stat().st_size for path in (with_set / "fields/t/train").glob("*.values"))
    assert 0 < report["num_bytes"] < parts
    require_values(URL)


def test_values_of_a_bucket_are_kept_in_a_cache(with_set, s3, tmp_path):
    succeed(zb, "fields", "upload", with_set, "t", SETS)
    for _ in range(2):
        s3.reset()
        require_values(URL, shuffle="records", cache=tmp_path / "cache")
    assert not [name for _, name, _ in s3.requests if ".values" in name]


def test_damage_in_a_bucket_is_found(with_set):
    succeed(zb, "fields", "upload", with_set, "t", SETS)
    bucket = obstore.store.from_url(SETS)
    name = sorted(each["path"] for each in bucket.list().collect() if each["path"].endswith(".values"))[0]
    data = bytearray(bucket.get(name).bytes())
    step = len(data) // 64
    for place in range(4096, len(data), step):  # in the values, which are most of the part
        data[place] ^= 1
    bucket.put(name, bytes(data))
    with pytest.raises(ChecksumError):
        require_values(URL, shuffle="records")


def test_an_unfinished_set_stays_here(with_set):
    (with_set / "fields/t/train/index.json").unlink()
    assert "is not finished" in one_error(run_zb("fields", "upload", with_set, "t", SETS))
    shutil.rmtree(with_set / "fields")
    assert "there is no field set" in one_error(run_zb("fields", "upload", with_set, "t", SETS))


def test_a_store_goes_to_a_bucket_and_back_with_its_set(with_set, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "s3://bucket/stores/B"
    convert(with_set, "batch", url)
    assert not list(tmp_path.glob("*.upload*"))
    require_values(url, shuffle="records")
    assert "t (train)" in succeed(zb, "info", url).stdout
    convert(url, "hdf5", tmp_path / "C", shards=3)
    require_values(tmp_path / "C")
    with pytest.raises(ConvertError, match="has the field sets t, whose values would be lost"):
        convert(with_set, "hdf5", url, force=True)
    convert(with_set, "hdf5", url, force=True, drop_field_set=("t",))
    require_values(url)
    convert(with_set, "hdf5", url, force=True, drop_field_set=("t",), field_set=())
    assert not (RemotePath(url) / "fields/t/train/set.json").exists()


def test_an_upload_that_ended_before_its_sets_goes_on(with_set, s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "s3://bucket/stores/B"
    part = next((with_set / "fields/t/train").glob("*.values"))
    part.rename(tmp_path / part.name)
    with pytest.raises(FileNotFoundError):
        convert(with_set, "batch", url)
    (tmp_path / part.name).rename(part)
    convert(with_set, "batch", url, resume=True)
    require_values(url)
