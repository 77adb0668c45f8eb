"""Downloads from a real server that fails, stalls, cuts, changes its files, and ignores what it is asked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from zb_hdf5 import ArgumentError, ChecksumError, FormatError, IncompleteError, UnavailableError, fetch_shards
from zb_hdf5.commands.fetch import read_digests
from zb_hdf5.commands.zb import zb

ROOT = Path(__file__).parents[2]
NAMES = [f"s_{number:02}.parquet" for number in range(4)]


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files` by the rules of HTTP, but for the faults that `server.faults[name]` lists, in order."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, name = self.server, self.path.split("?")[0].rpartition("/")[2]
        server.requests.append((name, self.headers.get("Range"), self.headers.get("If-Range")))
        fault = server.faults[name].pop(0) if server.faults.get(name) else None
        if callable(fault):
            fault = fault()
        if isinstance(fault, tuple):
            return self.refuse(*fault)
        if name not in server.files:
            return self.refuse(404)
        return self.serve(server.files[name], fault)

    def refuse(self, status, headers=()):
        self.send_response(status)
        for header in dict(headers).items():
            self.send_header(*header)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def serve(self, data, fault):
        etag = self.server.etag(data)
        start = self.start(etag, fault)
        if start and start >= len(data):
            return self.refuse(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if etag:
            self.send_header("ETag" if etag.startswith(('"', "W/")) else "Last-Modified", etag)
        body = data[start:]
        if fault == "no length":
            self.close_connection = True
        elif fault in ("chunked", "chunked cut"):
            return self.serve_chunked(body, fault)
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault in ("cut", "stall") else body)
        if fault == "stall":
            self.wfile.flush()
            self.server.released.wait(30)
        if fault in ("cut", "stall"):
            self.close_connection = True

    def start(self, etag, fault):
        asked, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if asked is None or fault == "ignore range" or (condition != etag and fault != "ignore if-range"):
            return 0
        return int(asked.removeprefix("bytes=").rstrip("-")) - (fault == "wrong range")

    def serve_chunked(self, body, fault):
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        half = len(body) // 2
        for part in (body[:half],) if fault == "chunked cut" else (body[:half], body[half:], b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """A server of four files of 100,000 bytes; `faults[name]` is what goes wrong at each request, in order."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.files = {name: os.urandom(100_000) for name in NAMES}
        made.faults, made.requests, made.released = {}, [], threading.Event()
        made.etag = lambda data: f'"{hashlib.md5(data).hexdigest()}"'
        made.url = f"http://127.0.0.1:{made.server_port}/data/s_{{:02d}}.parquet"
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, name="http")
        thread.start()
        yield made
        made.released.set()
        made.shutdown()
        thread.join()


@pytest.fixture
def waits():
    return []


@pytest.fixture
def fetch(server, tmp_path, waits):
    """Return `fetch(count=1, **options)`, which notes its waits instead of waiting."""

    def run(count=1, **options):
        return fetch_shards(options.pop("url", server.url), count, tmp_path / "out", wait=waits.append, **options)

    return run


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def only_problem(reports):
    (report,) = reports
    assert not report.fetched
    return report.problem


# --- what works ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_all_files_arrive(server, fetch, tmp_path, workers):
    reports = fetch(4, workers=workers)
    assert content(tmp_path / "out") == server.files
    assert [Path(report.path).name for report in reports] == NAMES
    assert all(report.fetched and report.byte_count == 100_000 for report in reports)


def test_named_field_first_number_and_query(server, fetch, tmp_path):
    fetch(2, url=server.url.replace("{:02d}", "{index:02d}") + "?download=true", first=2)
    assert sorted(content(tmp_path / "out")) == NAMES[2:]


def test_finished_files_are_not_asked_for(server, fetch):
    fetch(2)
    assert len(server.requests) == 2
    reports = fetch(3)
    assert [report.fetched for report in reports] == [False, False, True]
    assert [name for name, _, _ in server.requests[2:]] == [NAMES[2]]


def test_an_empty_file_is_a_file(server, fetch, tmp_path):
    server.files[NAMES[0]] = b""
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: b""}


def test_chunked_answers(server, fetch, tmp_path):
    server.faults[NAMES[0]] = ["chunked cut", "chunked"]
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


def test_a_redirect_keeps_the_range(server, fetch, tmp_path):
    moved = (302, {"Location": f"/elsewhere/{NAMES[1]}"})
    server.faults = {NAMES[0]: [moved, moved], NAMES[1]: ["cut"]}
    assert fetch()[0].fetched
    assert server.requests[-1][:2] == (NAMES[1], "bytes=50000-")
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[1]]}


def test_progress_counts_bytes_and_expects_all_files_to_be_alike(fetch):
    seen = []
    fetch(4, progress=lambda received, expected: seen.append((received, expected)))
    assert sum(received for received, _ in seen) == 400_000
    assert {expected for _, expected in seen} == {400_000}


# --- what is tried again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_passing_failures_are_tried_again_with_growing_waits(server, fetch, tmp_path, waits, status):
    server.faults[NAMES[0]] = [(status,)] * 4
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}
    assert len(waits) == 4
    assert all(0.5 * 2**k <= wait_s <= 1.5 * 2**k for k, wait_s in enumerate(waits))


def test_five_attempts_and_no_more(server, fetch, tmp_path):
    server.faults[NAMES[0]] = [(503,)] * 9
    problem = only_problem(fetch())
    assert isinstance(problem, UnavailableError)
    assert str(problem) == (f"{server.url.format(0)}: expected 200 OK, found 503 Service Unavailable (attempt 5 of 5)")
    assert len(server.requests) == 5
    assert content(tmp_path / "out") == {}


@pytest.mark.parametrize(("value", "least", "most"), [("7", 7, 7), ("999999", 300, 300), ("soon", 0, 1.5)])
def test_retry_after_is_honoured(server, fetch, waits, value, least, most):
    server.faults[NAMES[0]] = [(503, {"Retry-After": value})]
    assert fetch()[0].fetched
    assert least <= waits[0] <= most


def test_retry_after_may_be_a_date(server, fetch, waits):
    server.faults[NAMES[0]] = [(503, {"Retry-After": formatdate(time.time() + 100, usegmt=True)})]
    assert fetch()[0].fetched
    assert 60 < waits[0] <= 100


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_lasting_failures_are_not_tried_again(server, fetch, tmp_path, status, waits):
    server.faults[NAMES[0]] = [(status,)]
    assert f"expected 200 OK, found {status}" in str(only_problem(fetch()))
    assert len(server.requests) == 1
    assert not waits
    assert content(tmp_path / "out") == {}


def test_one_missing_file_does_not_stop_the_others(server, fetch, tmp_path):
    del server.files[NAMES[1]]
    reports = fetch(4, workers=1)
    assert [report.fetched for report in reports] == [True, False, True, True]
    assert content(tmp_path / "out") == server.files


def test_nobody_listens(fetch, waits):
    problem = only_problem(fetch(url="http://127.0.0.1:9/s_{}.parquet"))
    assert "refused" in str(problem)
    assert len(waits) == 4


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_what_arrived_is_kept(server, fetch, tmp_path, fault):
    server.faults[NAMES[0]] = [fault]
    assert fetch(timeout_s=0.2)[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}
    assert server.requests[1] == (NAMES[0], "bytes=50000-", server.etag(server.files[NAMES[0]]))


def test_what_arrived_is_kept_for_the_next_run(server, fetch, tmp_path):
    server.faults[NAMES[0]] = ["cut", (503,), (503,), (503,), (503,)]
    assert only_problem(fetch()) is not None
    assert set(content(tmp_path / "out")) == {NAMES[0] + ".partial", NAMES[0] + ".partial.etag"}
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}
    assert server.requests[-1][1] == "bytes=50000-"


def test_a_cut_at_every_attempt_is_incomplete(server, fetch):
    server.faults[NAMES[0]] = ["cut"] * 5
    problem = only_problem(fetch())
    assert isinstance(problem, IncompleteError)
    assert "expected 100,000 bytes, found 96,875" in str(problem)


# --- versions --------------------------------------------------------------------------------------------------


def change(server):
    """A fault that changes the file before it is served."""

    def before():
        server.files[NAMES[0]] = os.urandom(90_000)

    return before


@pytest.mark.parametrize("then", [None, "ignore if-range"])
def test_two_versions_are_never_glued(server, fetch, tmp_path, then):
    def change():
        server.files[NAMES[0]] = os.urandom(90_000)
        return then

    server.faults[NAMES[0]] = ["cut", change]
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}
    assert server.requests[1][1] == "bytes=50000-"


def test_a_change_between_two_runs(server, fetch, tmp_path):
    server.faults[NAMES[0]] = ["cut", (404,)]
    only_problem(fetch())
    server.files[NAMES[0]] = os.urandom(30_000)  # less than what is there
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


@pytest.mark.parametrize("fault", ["ignore range", "wrong range"])
def test_a_server_that_answers_another_range(server, fetch, tmp_path, fault):
    server.faults[NAMES[0]] = ["cut", fault]
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


def test_the_time_of_the_last_change_is_a_version(server, fetch, tmp_path):
    server.etag = lambda data: "Sat, 21 Nov 2026 05:00:00 GMT"
    server.faults[NAMES[0]] = ["cut"]
    assert fetch()[0].fetched
    assert server.requests[1][1:] == ("bytes=50000-", "Sat, 21 Nov 2026 05:00:00 GMT")
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


@pytest.mark.parametrize("etag", ["", 'W/"weak"'])
def test_without_a_version_each_attempt_begins_anew(server, fetch, tmp_path, etag):
    server.etag = lambda data: etag
    server.faults[NAMES[0]] = ["cut"]
    assert fetch()[0].fetched
    assert server.requests[1][1] is None
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


def test_killed_before_the_rename(server, fetch, tmp_path):
    """All bytes are there, and the server has none to add (416): the next attempt takes the whole file."""
    (tmp_path / "out").mkdir()
    data = server.files[NAMES[0]]
    (tmp_path / "out" / f"{NAMES[0]}.partial").write_bytes(data)
    (tmp_path / "out" / f"{NAMES[0]}.partial.etag").write_text(server.etag(data))
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: data}


def test_a_partial_of_unknown_origin_is_not_kept(server, fetch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{NAMES[0]}.partial").write_bytes(b"x" * 200_000)
    assert fetch()[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


# --- digests ---------------------------------------------------------------------------------------------------


def digests_of(files):
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_digests_are_compared(server, fetch, tmp_path):
    good = digests_of(server.files)
    server.faults[NAMES[0]] = [change(server)]  # once another file
    original = server.files[NAMES[0]]
    problem = only_problem(fetch(sha256=good))
    assert isinstance(problem, ChecksumError)
    assert f"expected sha256 {good[NAMES[0]]}, found {digests_of(server.files)[NAMES[0]]}" in str(problem)
    assert content(tmp_path / "out") == {}
    assert len(server.requests) == 5
    server.files[NAMES[0]] = original
    assert fetch(4, sha256=good)[0].fetched
    assert content(tmp_path / "out") == server.files


def test_an_answer_without_a_length_needs_a_digest(server, fetch, tmp_path):
    server.faults[NAMES[0]] = ["no length", "no length"]
    assert "does not say how long" in str(only_problem(fetch()))
    assert content(tmp_path / "out") == {}
    assert fetch(sha256=digests_of(server.files))[0].fetched
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


def test_digest_lists(tmp_path):
    for name in NAMES[:2]:
        (tmp_path / name).write_bytes(name.encode())
    made = subprocess.run(["sha256sum", *NAMES[:2]], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / "list").write_text(made)
    assert read_digests(tmp_path / "list") == digests_of({name: name.encode() for name in NAMES[:2]})
    (tmp_path / "list").write_text(made + "nonsense\n")
    with pytest.raises(FormatError, match="list: line 3: expected a line of sha256sum, found 'nonsense'"):
        read_digests(tmp_path / "list")
    (tmp_path / "list").write_bytes(b"PAR1\xff\n")
    with pytest.raises(FormatError, match=r"list: line 1: expected a line of sha256sum, found 'PAR1\\udcff'"):
        read_digests(tmp_path / "list")


def test_a_redirect_to_no_host_is_the_problem_of_the_file(server, fetch):
    server.faults[NAMES[0]] = [(302, {"Location": "http://example..org/x"})] * 5
    assert isinstance(only_problem(fetch()), UnavailableError)


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("http://host/shard.parquet", "names must differ"),
        ("http://host/{:05d}/shard.parquet", "names must differ"),
        ("http://host/{:05d}/", "ends in a file name"),
        ("http://host/{:05d}/%2e%2e", "ends in a file name"),
        ("file:///etc/{:05d}", "expected an http or https URL"),
        ("shard_{:05d}.parquet", "expected an http or https URL"),
        ("http://host/{name}", "expected one field"),
        ("http://host/{:05q}", "expected one field"),
        ("http://host/{", "expected one field"),
        ("http://host/{}{}", "expected one field"),
        ("http://host/{index[0]}", "expected one field"),
        ("http://host:port/{}", "expected an http or https URL"),
        ("http://[::1/{}", "expected an http or https URL"),
        ("http:///{}", "expected an http or https URL"),
        ("http://example..org/x_{:05d}", "expected an http or https URL"),
        ("http://host/shard {}", "percent-encoded, found 'http://host/shard 0'"),
        ("http://host/größe_{}", "percent-encoded"),
        ("http://host/%00{}", "ends in a file name"),
    ],
)
def test_templates_that_cannot_work(tmp_path, template, message):
    with pytest.raises(ArgumentError, match=message):
        fetch_shards(template, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_of_this_machine_stops_the_other_files(server, fetch, tmp_path):
    """The first file stalls, the second one cannot be written: nothing more is asked for."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{NAMES[1]}.partial").mkdir()
    server.faults[NAMES[0]] = ["stall"]
    with pytest.raises(IsADirectoryError):
        fetch(4, workers=2, timeout_s=0.2)
    assert {name for name, _, _ in server.requests} <= {NAMES[0]}  # or not even that


def test_a_list_without_the_file(server, tmp_path):
    with pytest.raises(ArgumentError, match=r"s_01\.parquet: the list of digests has no line"):
        fetch_shards(server.url, 2, tmp_path, sha256={NAMES[0]: "0" * 64})
    assert not server.requests


def test_a_second_process_on_the_same_file_is_told(server, fetch, tmp_path):
    (tmp_path / "out").mkdir()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / "out" / f"{NAMES[0]}.partial")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rival:
        rival.stdout.readline()
        assert "another process is writing it" in str(only_problem(fetch()))
        rival.communicate(b"\n")
    assert fetch()[0].fetched


def test_a_full_disk_is_no_failure_of_the_server(server, fetch, mount_disk, waits):
    disk = mount_disk(64, "out")
    with pytest.raises(OSError, match="No space left") as caught:
        fetch(4, workers=2)
    assert caught.value.errno == errno.ENOSPC
    assert not waits
    assert not [name for name in os.listdir(disk) if name.endswith(".parquet")]


# --- the command -----------------------------------------------------------------------------------------------


def run_zb(*arguments):
    return CliRunner().invoke(zb, ["fetch", *map(str, arguments)])


def test_command(server, tmp_path):
    done = run_zb(server.url, "-n", 2, "-w", 2, "-o", tmp_path / "out")
    assert done.exit_code == 0
    assert done.stdout == "fetched  2 of 2 files, 195.3 KiB; 0 were there already\n"
    done = run_zb(server.url, "-n", 5, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 5
    report = json.loads(done.stdout)
    assert [file["fetched"] for file in report["files"]] == [False, False, True, True, False]
    assert "found 404" in report["files"][4]["problem"]
    assert not report["ok"]


def test_command_with_digests(server, tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.commands.fetch.FIRST_DELAY_S", 0.0)
    good = digests_of(server.files)
    (tmp_path / "list").write_text("".join(f"{digest} *{name}\n" for name, digest in good.items()))
    server.files[NAMES[1]] = b"other"
    done = run_zb(server.url, "-n", 2, "--sha256-file", tmp_path / "list", "-o", tmp_path / "out", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "", "")
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


def test_a_killed_run_goes_on(server, tmp_path):
    """SIGTERM in the middle of a stalled file: exit 143 soon after the read ends, nothing half under its name."""
    server.faults[NAMES[0]] = ["stall"]
    code = "from zb_hdf5.commands.zb import zb; zb()"
    command = [sys.executable, "-c", code, "fetch", server.url, "-n", "1", "-o", str(tmp_path / "out")]
    partial = tmp_path / "out" / f"{NAMES[0]}.partial"
    with subprocess.Popen(command, cwd=ROOT) as run:
        deadline = time.monotonic() + 20
        while (not partial.exists() or partial.stat().st_size < 50_000) and time.monotonic() < deadline:
            time.sleep(0.02)
        run.terminate()
        time.sleep(0.2)
        server.released.set()
        assert run.wait(20) == 143
    assert set(content(tmp_path / "out")) == {partial.name, partial.name + ".etag"}
    assert run_zb(server.url, "-n", 1, "-o", tmp_path / "out").exit_code == 0
    assert content(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}
    assert server.requests[-1][1] == "bytes=50000-"
