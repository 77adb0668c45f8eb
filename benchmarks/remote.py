"""A store behind HTTP: the loader beside the cap of the line, and beside `obstore`'s own bare reads.

nginx serves batches of 1 MiB. Behind a line of 200 MB/s (`tc tbf` in a network namespace, which needs root) it answers
each request 20 ms late (its modules echo and auth_request: `netem` is not in every kernel), and the loader reads in
global order with its default prefetch. On the loopback device, without delay, the same extents are read by `get_range`
of `obstore` in as many threads. Interleaved; the bars:

- behind the line 0.85 of its cap; the first batch after 3 round trips, one of them for `shards.json`;
- without delay 0.9 of the bare reads.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.measure import Bar, Spread, bar_plot, machine, machine_line, markdown_table, say_progress, verdict
from zb_hdf5 import Loader, ShardEntry, ShardIndex, open_writer
from zb_hdf5.errors import UnavailableError

BATCH: Final = (32, 8192)
BATCH_BYTES: Final = 4 * BATCH[0] * BATCH[1]
SHARDS: Final = 4
DELAY_S: Final = 0.02
CAP_BYTES: Final = 200_000_000
SPACE: Final = "zb-line"
ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
ECHO: Final = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")
#: The share of its reference that a row must reach, by the name of the row.
BARS: Final = {"line": 0.85, "no delay, int32": 0.9}


def measure(folder: Path, *, quick: bool = False, repeats: int | None = None) -> dict[str, Any]:
    """Serve a store, and read it in turns."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        raise UnavailableError("needs nginx (Debian: nginx-light libnginx-mod-http-echo)")
    count, repeats = (24, repeats or 1) if quick else (256, repeats or 5)
    folder.chmod(0o755)
    write_store(folder / "store", count)
    rates: dict[str, list[float]] = {}
    firsts: list[float] = []
    with serve(nginx, folder, "127.0.0.1", 8391, []) as near, _line(nginx, folder) as far:
        ways: dict[str, Callable[[int], int]] = {
            "bare get_range": lambda epoch: bare_reads(near, count, epoch),
            "no delay, int32": lambda epoch: read_epoch(near, epoch, torch.int32),
            "no delay, int64": lambda epoch: read_epoch(near, epoch, torch.int64),
        }
        if far:
            ways["line"] = lambda epoch: read_epoch(far, epoch, torch.int64)
        for turn in range(repeats + 1):
            for name, read in ways.items():
                say_progress(f"measuring {name}")
                start = time.perf_counter()
                read_bytes = read(turn)
                if turn:  # the first turn fills the page cache
                    rates.setdefault(name, []).append(read_bytes / (time.perf_counter() - start))
            if far:
                firsts.append(first_batch_s(far))
    ratios = {"no delay, int32": "bare get_range", "no delay, int64": "bare get_range"}
    rows = []
    for name, found in rates.items():
        beside = rates.get(ratios.get(name, ""), [CAP_BYTES if name == "line" else r for r in found])
        ratio = Spread.quartiles([a / b for a, b in zip(found, beside, strict=True)])
        rate = Spread.quartiles(found)
        rows.append({"name": name, "bytes_per_s": rate.as_json(), "ratio": ratio.as_json(), "bar": BARS.get(name)})
    return {
        "benchmark": "remote", "quick": quick, "machine": machine(), "machine_line": machine_line(), "rows": rows,
        "first_batch_s": Spread.quartiles(firsts).as_json() if firsts else None,
    }  # fmt: skip


def write_store(folder: Path, count: int) -> None:
    """Write batches of 1 MiB in some shards."""
    folder.mkdir()
    entries = []
    for number in range(SHARDS):
        tokens = np.random.default_rng(number).integers(0, 50_257, (count // SHARDS, *BATCH), np.uint32)
        with open_writer(folder / f"shard-{number:05}.h5", batch_size=BATCH[0], seq_len=BATCH[1]) as writer:
            writer.write(tokens)
            entries.append(ShardEntry.of(writer.finish()))
    index = ShardIndex(writer.meta, entries)
    replace(index, meta=replace(writer.meta, total_records=count * BATCH[0])).save(folder)


# --- servers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serve(nginx: str, folder: Path, address: str, port: int, before: list[str], late: bool = False) -> Iterator[str]:
    """Serve a folder, and yield the URL of its store."""
    place = folder / f"nginx-{port}"
    place.mkdir()
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{name}_temp_path {place}/{name};" for name in names)
    locations = f"location / {{ root {folder}; {'auth_request /wait;' if late else ''} }}"
    if late:
        locations += f" location = /wait {{ echo_sleep {DELAY_S}; echo ok; }}"
    (place / "nginx.conf").write_text(
        (f"load_module {ECHO};\n" if late else "")
        + f"user root; daemon off; pid {place}/pid; error_log {place}/error.log;\n"
        "events { worker_connections 1024; }\n"
        f"http {{ access_log off; sendfile on; keepalive_requests 1000000; {temporary}\n"
        f"server {{ listen {address}:{port}; {locations} }} }}\n"
    )
    command = [*before, nginx, "-p", str(place), "-c", str(place / "nginx.conf")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield f"http://{address}:{port}/store"
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def _line(nginx: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a store behind a capped line, or "" where this machine makes none."""
    inside = ["ip", "netns", "exec", SPACE]
    steps = (
        f"ip netns add {SPACE}",
        f"ip link add zb-near type veth peer name zb-far netns {SPACE}",
        f"ip addr add {ADDRESSES[0]}/24 dev zb-near",
        "ip link set zb-near up",
        f"ip -n {SPACE} addr add {ADDRESSES[1]}/24 dev zb-far",
        f"ip -n {SPACE} link set zb-far up",
        f"tc -n {SPACE} qdisc add dev zb-far root tbf rate {CAP_BYTES * 8}bit burst 1mb latency 100ms",
    )
    try:
        made = ECHO.exists() and shutil.which("ip") is not None
        made = made and all(subprocess.run(step.split(), capture_output=True).returncode == 0 for step in steps)
        if not made:
            yield ""
            return
        with serve(nginx, folder, ADDRESSES[1], 8392, inside, late=True) as url:
            yield url
    finally:
        if shutil.which("ip"):
            subprocess.run(["ip", "netns", "del", SPACE], capture_output=True)


# --- ways --------------------------------------------------------------------------------------------------------


def read_epoch(url: str, epoch: int, dtype: torch.dtype) -> int:
    """Read one epoch by the loader; return its bytes as they are stored."""
    with Loader(url, epoch=epoch, dtype=dtype, rank=0, world_size=1) as loader:
        return sum(BATCH_BYTES for _ in loader)


def first_batch_s(url: str) -> float:
    """Return the time from nothing to the first batch."""
    start = time.perf_counter()
    with Loader(url, rank=0, world_size=1, prefetch=0) as loader:
        next(loader)
        return time.perf_counter() - start


def bare_reads(url: str, count: int, epoch: int) -> int:
    """Read the extents of an epoch by `obstore` alone, as many at the same time."""
    import obstore

    with Loader(url, epoch=epoch, rank=0, world_size=1) as loader:
        index = loader.reader.index  # type: ignore[attr-defined]
        order = [int(number) for number in loader.plan.requests_from(0)]  # type: ignore[arg-type]
        (most_bytes, _) = loader.reader.in_flight or (0, 0)
    store = obstore.store.from_url(url, client_options={"allow_http": True})
    extents = [entry.extents("batches", BATCH_BYTES) for entry in index.shards]

    def read(number: int) -> int:
        shard, within = divmod(number, count // SHARDS)
        path, start = index.shards[shard].path, extents[shard].offset(within)
        return len(obstore.get_range(store, path, start=start, length=BATCH_BYTES))

    with ThreadPoolExecutor(most_bytes // BATCH_BYTES) as pool:
        return sum(pool.map(read, order))


# --- report ------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the table and the bars, as markdown."""
    quick, table, lines = result["quick"], [], []
    for row in result["rows"]:
        rate, ratio = Spread(**row["bytes_per_s"]), Spread(**row["ratio"])
        beside = "the cap of 200 MB/s" if row["name"] == "line" else "bare get_range"
        table.append([row["name"], f"{rate.median / 1e6:,.0f}", f"{ratio.text(2)} of {beside}"])
        if row["bar"]:
            met = verdict(ratio.median >= row["bar"], quick)
            lines.append(f"- {row['name']}: {ratio.median:.2f} of {beside}, bar {row['bar']}: {met}")
    if result["first_batch_s"]:
        trips = result["first_batch_s"]["median"] / DELAY_S
        lines.append(f"- first batch after {trips:.1f} round trips of 20 ms, bar 3 and the time to open: not judged")
    else:
        lines.append("- no line of 200 MB/s on this machine: needs root, tc, and nginx with its module echo")
    head = f"## A store behind nginx, batches of 1 MiB\n{result['machine_line']}. Interleaved; median (quartiles)."
    return "\n".join([head, "", markdown_table(("row", "MB/s", "ratio"), table), "", *lines])


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the rates."""
    bars = [Bar(row["name"], Spread(**row["bytes_per_s"]), row["name"].split(",")[0]) for row in result["rows"]]
    bar_plot(path, bars, title="A store behind nginx", subtitle=result["machine_line"], unit="MB/s", scale=1e-6)
