"""Downloads from a real server that fails, stalls, cuts, changes its files, and ignores what it is asked."""

import errno
import hashlib
import json
import os
import re
import shlex
import subprocess
import threading
import time
from pathlib import Path

import pytest
from commandline import run_zb
from contents import files_in
from contract import is_refused
from interpreter import start_program

from zb_hdf5 import ArgumentError, ChecksumError, FormatError, UnavailableError
from zb_hdf5.commands.downloads import fetch_shards, read_digests
from zb_hdf5.commands.zb_fetch import zb_fetch

ROOT = Path(__file__).parents[2]
NAMES = [f"s_{number:02}.parquet" for number in range(4)]


class Server:
    """nginx behind the proxy, with four files of 100,000 bytes; `headers` are sent with all answers."""

    def __init__(self, folder, proxy):
        self.folder, self.proxy = folder, proxy
        self.url = f"{proxy.url}/s_{{:02d}}.parquet"
        #: Name -> what is done at each read: None, a fault of `Proxy`, or a function of this server that runs first.
        self.faults = {}
        self.headers = {}
        self.released = threading.Event()
        self.stall = {"cut": 5000, "then": lambda handler: self.released.wait(30)}
        for name in NAMES:
            self.put(name, os.urandom(100_000))
        proxy.fault = self._fault

    @property
    def files(self):
        return files_in(self.folder)

    @property
    def requests(self):
        """(name, range) of each read."""
        return [(name, span) for method, name, span in self.proxy.requests if method == "GET"]

    def put(self, name, data):
        (self.folder / name).write_bytes(data)

    def _fault(self, number, method, name, span):
        fault = self.faults[name].pop(0) if method == "GET" and self.faults.get(name) else None
        return {"headers": self.headers, **((fault(self) if callable(fault) else fault) or {})}


@pytest.fixture
def server(web):
    made = Server(web.folder, web)
    yield made
    made.released.set()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Have parts of 10,000 bytes."""
    monkeypatch.setattr("zb_hdf5.files.objects.PART_BYTES", 10_000)


@pytest.fixture
def fetch(server, tmp_path):
    """Return `fetch(count=1, **options)`."""

    def run(count=1, **options):
        return fetch_shards(options.pop("url", server.url), count, tmp_path / "out", **options)

    return run


@pytest.fixture
def arrives(server, fetch, tmp_path):
    """Return a check that a run fetches the first file as it is now on the server."""

    def check(**options):
        assert fetch(**options)[0].fetched
        assert files_in(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}

    return check


def only_problem(reports):
    (report,) = reports
    assert not report.fetched
    return report.problem


# --- what works ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [1, 3])
def test_all_files_arrive(server, fetch, tmp_path, workers):
    reports = fetch(4, workers=workers)
    assert files_in(tmp_path / "out") == server.files
    assert [Path(report.path).name for report in reports] == NAMES
    assert all(report.fetched and report.byte_count == 100_000 for report in reports)


def test_named_field_and_first_number(server, fetch, tmp_path):
    fetch(2, url=server.url.replace("{:02d}", "{index:02d}"), first=2)
    assert sorted(files_in(tmp_path / "out")) == NAMES[2:]


def test_finished_files_are_not_asked_for(server, fetch):
    fetch(2)
    assert len(server.requests) == 20
    reports = fetch(3)
    assert [report.fetched for report in reports] == [False, False, True]
    assert {name for name, _ in server.requests[20:]} == {NAMES[2]}


def test_an_empty_file_is_a_file(server, arrives):
    server.put(NAMES[0], b"")
    arrives()


def test_a_redirect_keeps_the_range(server, fetch, tmp_path):
    (server.folder / NAMES[0]).rename(server.folder / "x")
    moved = {"status": 302, "headers": {"Location": "/x"}}
    server.proxy.fault = lambda number, method, name, span: moved if name == NAMES[0] else None
    assert fetch()[0].fetched
    assert server.requests[-1] == ("x", "bytes=90000-99999")
    assert files_in(tmp_path / "out") == {NAMES[0]: server.files["x"]}


def test_progress_counts_bytes_and_expects_all_files_to_be_alike(fetch):
    seen = []
    fetch(4, progress=lambda received, expected: seen.append((received, expected)))
    assert sum(received for received, _ in seen) == 400_000
    assert {expected for _, expected in seen} == {400_000}


def test_progress_expects_nothing_of_a_file_that_failed(server, fetch):
    (server.folder / NAMES[1]).unlink()
    seen = []
    fetch(4, workers=1, progress=lambda received, expected: seen.append((received, expected)))
    assert (sum(received for received, _ in seen), seen[-1]) == (300_000, (0, 300_000))


def test_progress_expects_only_what_was_not_there_before(server, fetch, tmp_path):
    server.faults[NAMES[0]] = [None, None, *[{"status": 503}] * 5]
    only_problem(fetch())  # it keeps 20,000 bytes of the first file
    (tmp_path / "out" / NAMES[2]).write_bytes(server.files[NAMES[2]])
    seen = []
    fetch(4, workers=1, progress=lambda received, expected: seen.append((received, expected)))
    assert (sum(received for received, _ in seen), seen[-1]) == (280_000, (0, 280_000))


# --- what is tried again ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("faults", [
    *([{"status": status}] * 4 for status in (500, 503, 429, 408)),
    [None, lambda server: server.put(NAMES[0], os.urandom(90_000))],  # two versions are never glued
], ids=["500", "503", "429", "408", "changed"])  # fmt: skip
def test_passing_failures_are_tried_again(server, faults, arrives):
    server.faults[NAMES[0]] = list(faults)
    arrives()


def test_as_many_attempts_as_a_read_has_and_no_more(server, fetch, tmp_path):
    server.faults[NAMES[0]] = [{"status": 503}] * 9
    problem = only_problem(fetch())
    assert isinstance(problem, UnavailableError)
    assert "503 Service Unavailable" in str(problem)
    assert "5 attempts" in str(problem)
    assert len(server.requests) == 5


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_lasting_failures_are_not_tried_again(server, fetch, tmp_path, status):
    server.faults[NAMES[0]] = [{"status": status}]
    assert NAMES[0] in str(only_problem(fetch()))
    assert len(server.requests) == 1


def test_one_missing_file_does_not_stop_the_others(server, fetch, tmp_path):
    (server.folder / NAMES[1]).unlink()
    reports = fetch(4, workers=1)
    assert [report.fetched for report in reports] == [True, False, True, True]
    assert files_in(tmp_path / "out") == server.files


def test_nobody_listens(fetch, tmp_path):
    assert "http://127.0.0.1:9/s_0.parquet" in str(only_problem(fetch(url="http://127.0.0.1:9/s_{}.parquet")))
    assert files_in(tmp_path / "out") == {}


@pytest.mark.parametrize("stalls", [False, True])
def test_a_part_that_is_cut_is_read_again(server, stalls, arrives):
    server.faults[NAMES[0]] = [None, server.stall if stalls else {"cut": 5000}]
    arrives()
    assert [span for _, span in server.requests[1:3]] == ["bytes=10000-19999"] * 2


def test_bytes_that_arrived_are_kept_for_the_next_run(server, fetch, tmp_path, arrives):
    server.faults[NAMES[0]] = [None, None, *[{"status": 503}] * 5]
    assert only_problem(fetch()) is not None
    assert set(files_in(tmp_path / "out")) == {NAMES[0] + ".partial", NAMES[0] + ".partial.version"}
    asked = len(server.requests)
    arrives()
    assert server.requests[asked][1] == "bytes=20000-29999"


# --- versions --------------------------------------------------------------------------------------------------
def test_a_change_between_two_runs(server, fetch, arrives):
    server.faults[NAMES[0]] = [*[None] * 5, {"status": 404}]
    only_problem(fetch())
    server.put(NAMES[0], os.urandom(30_000))  # less than what is there
    arrives()


def test_a_server_without_ranges_is_named(server, fetch, tmp_path):
    server.faults[NAMES[0]] = [{"status": 200, "body": server.files[NAMES[0]]}] * 9
    assert "expected a server that answers ranged reads" in str(only_problem(fetch()))
    assert files_in(tmp_path / "out") == {}  # nothing that a later run could go on with


def test_the_time_of_the_last_change_is_a_version(server, fetch, arrives):
    server.headers = {"ETag": None, "Last-Modified": "Sat, 21 Nov 2026 05:00:00 GMT"}
    server.faults[NAMES[0]] = [None, {"status": 404}]
    only_problem(fetch())
    server.headers["Last-Modified"] = "Sat, 21 Nov 2026 06:00:00 GMT"
    server.put(NAMES[0], os.urandom(100_000))
    arrives()


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_version_a_digest_is_needed_and_each_run_begins_anew(server, fetch, arrives, etag):
    server.headers = {"ETag": etag, "Last-Modified": None}
    assert "pass --sha256-file" in str(only_problem(fetch()))
    server.faults[NAMES[0]] = [None, {"status": 404}]
    digests = digests_of(server.files)
    only_problem(fetch(sha256=digests))
    arrives(sha256=digests)
    assert [span for _, span in server.requests].count("bytes=0-9999") == 2


def test_killed_before_the_rename(server, arrives, tmp_path):
    """All bytes of a version are there: nothing more is asked for."""
    (tmp_path / "out").mkdir()
    data = server.files[NAMES[0]]
    server.headers = {"ETag": '"v"'}
    (tmp_path / "out" / f"{NAMES[0]}.partial").write_bytes(data)
    (tmp_path / "out" / f"{NAMES[0]}.partial.version").write_text(json.dumps([len(data), '"v"']))
    arrives()
    assert server.requests == []


def test_killed_after_the_rename(fetch, arrives, tmp_path):
    """Nothing is left of a run that had named a file, and not yet removed the version of its bytes."""
    arrives()
    (tmp_path / "out" / f"{NAMES[0]}.partial.version").write_text("[100000, null]")
    assert fetch()[0].problem is None
    assert list(files_in(tmp_path / "out")) == [NAMES[0]]


def test_a_partial_of_unknown_origin_is_not_kept(tmp_path, arrives):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{NAMES[0]}.partial").write_bytes(b"x" * 200_000)
    arrives()


# --- digests ---------------------------------------------------------------------------------------------------
def digests_of(files):
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_digests_are_compared(server, fetch, tmp_path):
    good = digests_of(server.files)
    original = server.files[NAMES[0]]
    server.put(NAMES[0], os.urandom(90_000))
    problem = only_problem(fetch(sha256=good))
    assert isinstance(problem, ChecksumError)
    assert f"expected sha256 {good[NAMES[0]]}, found {digests_of(server.files)[NAMES[0]]}" in str(problem)
    assert files_in(tmp_path / "out") == {}
    server.put(NAMES[0], original)
    assert fetch(4, sha256=good)[0].fetched
    assert files_in(tmp_path / "out") == server.files


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


# --- what is refused -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("template", "message"), [
    ("http://host/shard.parquet", "names must differ"), ("http://host/{:05d}/shard.parquet", "names must differ"),
    ("http://host/{:05d}/", "ends in a file name"), ("http://host/{:05d}/%2e%2e", "ends in a file name"),
    ("file:///etc/{:05d}", "expected a URL"), ("http://host/{:05d}.parquet?download=true", "without a query"),
    ("shard_{:05d}.parquet", "expected a URL"), ("http://host/{name}", "expected one field"),
    ("http://host/{:05q}", "expected one field"), ("http://host/{", "expected one field"),
    ("http://host/{}{}", "expected one field"), ("http://host/{index[0]}", "expected one field"),
    ("http://host:port/{}", "expected a URL"), ("http://[::1/{}", "expected a URL"), ("http:///{}", "expected a URL"),
    ("http://example..org/x_{:05d}", "expected a URL"),
    ("http://host/shard {}", "percent-encoded, found 'http://host/shard 0'"),
    ("http://host/größe_{}", "percent-encoded"), ("http://host/%00{}", "ends in a file name"),
])  # fmt: skip
def test_templates_that_cannot_work(tmp_path, template, message):
    is_refused(ArgumentError, lambda: fetch_shards(template, 2, tmp_path / "out"), match=message)
    assert not (tmp_path / "out").exists()


def test_a_failure_of_this_machine_stops_the_other_files(server, fetch, tmp_path):
    """The first file stalls, the second one cannot be written: nothing more is asked for."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{NAMES[1]}.partial").mkdir()
    server.faults[NAMES[0]] = [server.stall]
    is_refused(IsADirectoryError, lambda: fetch(4, workers=2))
    assert {name for name, _ in server.requests} <= {NAMES[0]}  # or not even that


def test_a_list_without_the_file(server, tmp_path):
    with pytest.raises(ArgumentError, match=r"s_01\.parquet: the list of digests has no line"):
        fetch_shards(server.url, 2, tmp_path, sha256={NAMES[0]: "0" * 64})
    assert not server.requests


def test_a_second_process_on_the_same_file_is_told(server, fetch, tmp_path):
    (tmp_path / "out").mkdir()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with start_program(code, tmp_path / "out" / f"{NAMES[0]}.partial") as rival:
        rival.stdout.readline()
        assert "another process is writing it" in str(only_problem(fetch()))
        rival.communicate("\n")
    assert fetch()[0].fetched


def test_a_full_disk_is_no_failure_of_the_server(server, fetch, mount_disk):
    disk = mount_disk(64, "out")
    with pytest.raises(OSError, match="No space left") as caught:
        fetch(4, workers=2)
    assert caught.value.errno == errno.ENOSPC
    assert not [name for name in os.listdir(disk) if name.endswith(".parquet")]


# --- the command -----------------------------------------------------------------------------------------------
def test_the_example_of_the_help_runs_as_printed_but_for_its_server(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [line] = re.findall(r"Example: zb fetch (.*)", zb_fetch.help)
    expected = {f"shard_{number:05d}.parquet": b"some" for number in range(10)}
    for name, data in expected.items():
        server.put(name, data)
    done = run_zb("fetch", *shlex.split(line.replace("https://example.org", server.proxy.url)))
    assert done.exit_code == 0, done.output
    assert files_in(tmp_path / "text") == expected


def test_command(server, tmp_path):
    done = run_zb("fetch", server.url, "-n", 2, "-w", 2, "-o", tmp_path / "out")
    assert done.exit_code == 0
    assert done.stdout == "fetched  2 of 2 files, 195.3 KiB; 0 were there already\n"
    done = run_zb("fetch", server.url, "-n", 5, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 5
    report = json.loads(done.stdout)
    assert [file["fetched"] for file in report["files"]] == [False, False, True, True, False]
    assert "no such object" in report["files"][4]["problem"]
    assert not report["ok"]


def test_command_with_digests(server, tmp_path):
    good = digests_of(server.files)
    (tmp_path / "list").write_text("".join(f"{digest} *{name}\n" for name, digest in good.items()))
    server.put(NAMES[1], b"other")
    done = run_zb("fetch", server.url, "-n", 2, "--sha256-file", tmp_path / "list", "-o", tmp_path / "out", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "", "")
    assert files_in(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}


def test_a_killed_run_goes_on(server, tmp_path):
    """SIGTERM in the middle of a stalled file: exit 143 soon after the read ends, nothing half under its name."""
    server.faults[NAMES[0]] = [None, server.stall]
    code = "from zb_hdf5.files import objects; objects.PART_BYTES = 50_000; from zb_hdf5.commands.zb import zb; zb()"
    partial = tmp_path / "out" / f"{NAMES[0]}.partial"
    with start_program(code, "fetch", server.url, "-n", 1, "-o", tmp_path / "out", folder=ROOT) as run:
        deadline = time.monotonic() + 20
        while len(server.requests) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        run.terminate()
        time.sleep(0.2)
        server.released.set()
        assert run.wait(20) == 143
    assert set(files_in(tmp_path / "out")) == {partial.name, partial.name + ".version"}
    asked = len(server.requests)
    assert run_zb("fetch", server.url, "-n", 1, "-o", tmp_path / "out").exit_code == 0
    assert files_in(tmp_path / "out") == {NAMES[0]: server.files[NAMES[0]]}
    assert all(span != "bytes=0-9999" for _, span in server.requests[asked:])
