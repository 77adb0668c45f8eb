"""Faults of servers: one clear error, or a retry that nobody sees. Never a wrong token, never a hang."""

import contextlib
import os
import re
import time

import numpy as np
import pytest
from contents import write_batches
from contract import is_refused, random_tokens
from damage import flip_stored
from packed import write_packed

from zb_hdf5 import Loader, convert, errors, open_reader
from zb_hdf5.files.objects import RemoteObject

TOKENS = random_tokens(30, 4, 256)


@pytest.fixture(params=["http", pytest.param("s3", marks=pytest.mark.slow)])
def far_store(request, tmp_path, write_store):
    """Return (proxy, url, folder or None) of a store of two shards."""
    if request.param == "http":
        web = request.getfixturevalue("web")
        write_store(web.folder / "store", TOKENS, (11,))
        return web, f"{web.url}/store"
    proxy = request.getfixturevalue("s3")
    upload = request.getfixturevalue("upload")
    return proxy, upload(write_store(tmp_path / "store", TOKENS, (11,)), "s3://bucket/store")


def read_all(url):
    with Loader(url, shuffle="sequential") as loader:
        return np.concatenate([step.numpy() for step in loader]).reshape(TOKENS.shape)


class TestSeenByNobody:
    """Every request fails at first."""

    @pytest.mark.parametrize("fault", [
        {"status": 503}, {"status": 500}, {"hang_up": True}, {"cut": 0}, {"cut": 7}, {"wait": 0.1},
    ], ids=["503", "500", "hang up", "cut before the body", "cut in the body", "slow"])  # fmt: skip
    @pytest.mark.thin
    def test_is_tried_again(self, far_store, fault):
        proxy, url = far_store
        seen = set()

        def once(number, method, name, span):
            again = (name, span) in seen
            seen.add((name, span))
            return None if again else fault

        proxy.fault = once
        np.testing.assert_array_equal(read_all(url), TOKENS)


class TestErrors:
    @pytest.mark.parametrize(("fault", "error", "match"), [
        ({"status": 503}, errors.UnavailableError, "503"),
        ({"hang_up": True}, errors.UnavailableError, "expected bytes"),
        ({"cut": 9}, errors.UnavailableError, "expected bytes"),
        ({"status": 401}, errors.UnavailableError, "access denied"),
        ({"status": 403}, errors.UnavailableError, "access denied"),
        ({"status": 404}, FileNotFoundError, "no such object"),
        ({"status": 416}, errors.IncompleteError, "cut short"),
        ({"status": 412}, errors.FormatError, "changed since it was opened"),
        ({"status": 302, "headers": {"Location": "/nowhere"}}, (errors.ZbError, FileNotFoundError), "shard"),
    ])  # fmt: skip
    @pytest.mark.thin
    def test_of_a_shard_that_cannot_be_read(self, far_store, fault, error, match):
        proxy, url = far_store
        with open_reader(url) as reader:
            np.testing.assert_array_equal(reader[0], TOKENS[0])
            proxy.fault = lambda number, method, name, span: fault
            with pytest.raises(error, match=match) as raised:
                reader.read_batch(3)
            assert "shard-00000.h5" in str(raised.value)
            assert "Debug source" not in str(raised.value)
            proxy.fault = lambda *request: None
            np.testing.assert_array_equal(reader[3], TOKENS[3])

    @pytest.mark.parametrize("status", [401, 403, 404, 503])
    def test_of_an_index_that_cannot_be_read(self, far_store, status):
        proxy, url = far_store
        proxy.fault = lambda number, method, name, span: {"status": status}
        is_refused(errors.ZbError, lambda: open_reader(url), match="store")

    @pytest.mark.parametrize(("content_range", "more"), [
        ("bytes 0-{size}/99999999", {}), ("bytes {start}-{stop}/5", {}), ("nonsense", {}), ("bytes 7-7/*", {}),
        ("bytes {start}-{stop}/99999", {"status": 206, "body": bytes(10)}),  # it looks whole, and is short
        (None, {"status": 200, "body": bytes(100_000)}),  # of a server that ignores ranges
    ])  # fmt: skip
    def test_of_a_wrong_range(self, far_store, content_range, more):
        proxy, url = far_store

        def lie(number, method, name, span):
            start, stop = map(int, span.removeprefix("bytes=").split("-"))
            said = content_range and content_range.format(start=start, stop=stop, size=stop - start)
            return {"headers": {"Content-Range": said} if said else {}, **more}

        with open_reader(url) as reader:
            reader.read_batch(0)
            proxy.fault = lie
            is_refused(errors.ZbError, lambda: reader.read_batch(3), match="shard-00000")


class TestOtherObjects:
    def test_an_object_that_is_replaced_in_an_epoch(self, web, write_store, write_file):
        write_store(web.folder / "store", TOKENS, (11,))
        with Loader(f"{web.url}/store", shuffle="sequential", prefetch=0) as loader:
            for number in range(3):
                np.testing.assert_array_equal(next(loader), TOKENS[number])
            write_file(web.folder / "store/shard-00000.h5", TOKENS[:11] + 1, overwrite=True)
            os.utime(web.folder / "store/shard-00000.h5", (0, 0))  # nginx's ETag has the second and the size
            told = r"00.h5: changed since it was opened: expected \(bytes, ETag\)"
            is_refused(errors.FormatError, lambda: next(loader), match=told)

    @pytest.mark.parametrize(("harm", "error"), [
        (lambda path: write_batches(path, TOKENS[11:] + 1, overwrite=True), (errors.ChecksumError, errors.FormatError)),
        (lambda path: path.write_bytes(b""), errors.IncompleteError),
        *((lambda path, kept=kept: path.write_bytes(path.read_bytes()[:kept]), errors.IncompleteError)
          for kept in (100, 5000, -1)),
        (lambda path: path.unlink(), FileNotFoundError),
        (lambda path: flip_stored(path, TOKENS[12]), errors.ChecksumError),
    ], ids=["replaced", "empty", "100 bytes", "5000 bytes", "a byte less", "gone", "flipped"])  # fmt: skip
    def test_one_that_is_harmed_before_it_is_read(self, harm, error, web, write_store):
        path = write_store(web.folder / "store", TOKENS, (11,)) / "shard-00001.h5"
        with open_reader(f"{web.url}/store") as reader:
            harm(path)
            np.testing.assert_array_equal(reader[10], TOKENS[10])
            is_refused(error, lambda: reader.read_batch(12), match="shard-00001")

    def test_answers_are_compared_where_the_server_has_no_strong_etag(self, web):
        (web.folder / "data.batch").write_bytes(bytes(100))
        tags = iter(['W/"a"', 'W/"a"', 'W/"b"'])
        web.fault = lambda number, method, name, span: {"headers": {"ETag": next(tags)}}
        source = RemoteObject(f"{web.url}/data.batch")
        source.read(0, 10), source.read(10, 20)
        is_refused(errors.FormatError, lambda: source.read(20, 30), match="changed since it was opened")
        source.close()


#: Seconds that a read may take of a hostile server, and bytes that an answer may have besides those asked for.
PATIENCE_S = 3
MOST_EXTRA_BYTES = 8 << 20
#: Seconds after which it has ended, on a machine that does much else.
LATEST_S = PATIENCE_S + 6
TABLES = ("shards.json", "pieces", "documents")


class Hostile:
    """The ways of a server that does harm; `sent` counts the bytes of its largest flood."""

    def __init__(self):
        self.sent = 0
        self.end_s = time.monotonic() + 30

    def flood(self, handler):
        sent = 0
        while sent < 8 * MOST_EXTRA_BYTES:
            sent += handler.connection.send(bytes(1 << 16))
            self.sent = max(self.sent, sent)

    def stall(self, handler):
        while time.monotonic() < self.end_s and handler.connection.recv(1) != b"":
            pass

    def drip(self, handler):
        while time.monotonic() < self.end_s:
            handler.connection.send(b"x")
            time.sleep(0.05)

    def faults(self):
        return {
            "lies of its size": {"headers": {"Content-Length": str(2**60)}, "then": self.stall},
            "lies of its range": {"headers": {"Content-Range": f"bytes 0-{2**60 - 1}/{2**60}"}},
            "lies of the whole": {"headers": {"Content-Range": f"bytes 0-99/{2**60}"}, "cut": 100},
            "floods": {"headers": {"Content-Length": str(2**60)}, "then": self.flood},
            "stalls in the body": {"headers": {"Content-Length": "100000"}, "cut": 5, "then": self.stall},
            "drips": {"headers": {"Content-Length": "100000"}, "cut": 5, "then": self.drip},
            "cuts each body": {"cut": 5},
        }


@pytest.mark.parametrize("way", Hostile().faults())
@pytest.mark.parametrize("kind", ["crc32", "batch", *TABLES])
@pytest.mark.thin
def test_a_hostile_server_is_an_error_in_time_and_within_memory(kind, way, web, tmp_path, monkeypatch):
    """Each kind of object, and each way: an error of ours or the right values, soon, and a few blocks at most."""
    monkeypatch.setenv("ZB_REMOTE_TIMEOUT", str(PATIENCE_S))
    write_packed(tmp_path / "packed.h5", [30, 40, 0, 7, 90, 3, 50, 61])
    convert(tmp_path / "packed.h5", "hdf5", web.folder / "store", shards=1)
    hostile = Hostile()
    hit = []

    def fault(number, method, name, span):
        first, last = map(int, (span or "=0-0").partition("=")[2].split("-"))
        part = "batch" if last - first == 31 else "crc32"
        if method != "GET" or kind != next((each for each in TABLES if each in name), part):
            return None
        hit.append(name)
        return hostile.faults()[way]

    expected = read_everything(web.folder / "store")
    web.fault = fault
    start_s = time.monotonic()
    try:
        assert read_everything(f"{web.url}/store") == expected
        found = "the right values"
    except (errors.FormatError, errors.IncompleteError, errors.UnavailableError, errors.ChecksumError) as error:
        found = str(error)
    hostile.end_s = 0
    assert time.monotonic() - start_s < LATEST_S
    assert hit
    assert hostile.sent < MOST_EXTRA_BYTES
    # the bytes that were asked for come first, and nobody waits for the others
    assert found != "the right values" or way in ("lies of its size", "floods")
    if way == "cuts each body":
        assert re.search("cut short on its way|response body", found)


class TestManyRanges:
    """Each of many ranges that are read together, and not the first and the last one only."""

    SIZE, COUNT = 1000, 12

    @pytest.fixture
    def source(self, web, monkeypatch):
        monkeypatch.setenv("ZB_REMOTE_TIMEOUT", str(PATIENCE_S))
        self.data = np.random.default_rng(3).bytes(self.SIZE * self.COUNT * 2)
        (web.folder / "data.bin").write_bytes(self.data)
        source = RemoteObject(f"{web.url}/data.bin")
        assert source.num_bytes == len(self.data)
        yield source, web
        source.close()

    def read(self, source):
        ranges = [(2 * number * self.SIZE, np.zeros(self.SIZE, "u1")) for number in range(self.COUNT)]
        source.read_ranges(ranges)
        return ranges

    @pytest.mark.parametrize("number", [0, 1, 6, 10, 11])
    def test_of_another_version_are_an_error(self, source, number):
        source, proxy = source
        span = f"bytes={2 * number * self.SIZE}-{(2 * number + 1) * self.SIZE - 1}"
        proxy.fault = lambda _, method, name, found: {"headers": {"ETag": '"other"'}} if found == span else None
        is_refused(errors.FormatError, lambda: self.read(source), match="changed since it was opened")

    def test_take_no_more_memory_than_was_asked_for(self, source):
        source, proxy = source
        hostile = Hostile()
        proxy.fault = lambda number, *_: hostile.faults()["floods"] if number % 3 else None
        start_s = time.monotonic()
        with contextlib.suppress(errors.FormatError):  # else the bytes that were asked for came first
            for start, found in self.read(source):
                assert found.tobytes() == self.data[start : start + self.SIZE]
        assert 0 < hostile.sent < MOST_EXTRA_BYTES
        assert time.monotonic() - start_s < LATEST_S

    def test_end_together(self, source, monkeypatch):
        """Not each of them after a time limit of its own."""
        monkeypatch.setattr("zb_hdf5.files.objects.LEAST_READS", 1)
        monkeypatch.setattr("zb_hdf5.files.objects.REQUEST_CORE_S", 60)
        source, proxy = source
        start_s = time.monotonic()
        proxy.fault = lambda *_: {"wait": 0.4}
        with pytest.raises(errors.UnavailableError, match=r"data.bin: not read within 3 s \(ZB_REMOTE_TIMEOUT\)"):
            self.read(source)
        assert time.monotonic() - start_s < LATEST_S


def read_everything(path):
    with Loader(path, targets=True, prefetch=0, rank=0, world_size=1) as loader:
        documents = [each.facts for each in loader.batches.corpus.documents[:8]]
        return [[x.tolist(), y.tolist()] for x, y in loader], documents


def test_the_limit_is_a_setting_that_is_named(web, monkeypatch):
    monkeypatch.setenv("ZB_REMOTE_TIMEOUT", "2.5")
    monkeypatch.setattr("zb_hdf5.files.objects.ATTEMPTS", 100)
    web.fault = lambda number, method, name, span: {"status": 503}
    start_s = time.monotonic()
    with pytest.raises(errors.UnavailableError, match=r"503.*attempts within 2.5 s \(ZB_REMOTE_TIMEOUT\)"):
        RemoteObject(f"{web.url}/x").read(0, 10)
    assert time.monotonic() - start_s < 2.6
    for text in ("none", "0", "nan", "-3"):
        monkeypatch.setenv("ZB_REMOTE_TIMEOUT", text)
        with pytest.raises(errors.ArgumentError, match=f"ZB_REMOTE_TIMEOUT: expected a number of seconds.*{text}"):
            RemoteObject(f"{web.url}/{text}/x").read(0, 10)


class TestPlaces:
    @pytest.mark.parametrize(("url", "unset", "error", "match"), [
        ("s3://no_bucket/store", (), errors.ZbError, r"no_bucket/store.*bucket does not exist"),
        ("s3://bucket/other", ["ALLOW_HTTP"], errors.UnavailableError, r"bucket/other/.*export AWS_ALLOW_HTTP=true"),
        ("s3://bucket/store", (), errors.FormatError, r"s3://bucket/store: no shards.json"),
        ("s3://bucket/without", ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY"], errors.UnavailableError,
         r"expected credentials.*AWS_ACCESS_KEY_ID"),
        ("http://127.0.0.1:9/store", (), errors.UnavailableError, r"http://127.0.0.1:9/store"),
    ])  # fmt: skip
    def test_where_nothing_can_be_read(self, url, unset, error, match, s3, monkeypatch):
        # who runs on no machine of AWS has nobody to ask
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
        for name in unset:
            monkeypatch.delenv(f"AWS_{name}")
        with pytest.raises(error, match=match) as raised:
            open_reader(url)
        assert not re.search("<|/latest/", str(raised.value))
        assert len(str(raised.value)) < 200 or "no_bucket" not in url

    def test_the_endpoint_has_the_name_of_other_tools(self, s3, upload, tmp_path, write_store, tokens, monkeypatch):
        url = upload(write_store(tmp_path / "store", tokens), "s3://bucket/named")
        monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ["AWS_ENDPOINT"])
        monkeypatch.delenv("AWS_ENDPOINT")
        with open_reader(url) as reader:
            np.testing.assert_array_equal(reader[0], tokens[0])

    def test_wrong_credentials(self, s3, upload, tmp_path, write_store, tokens):
        url = upload(write_store(tmp_path / "store", tokens), "s3://bucket/store")
        answer = b"<Error><Code>InvalidAccessKeyId</Code></Error>"
        s3.fault = lambda number, method, name, span: {"status": 403, "body": answer}
        is_refused(errors.UnavailableError, lambda: open_reader(url), match="access denied: expected credentials")
