"""A store behind HTTP without delay: the loader against a bare loop over the same client, 16 reads under way."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import measure as m
from benchmarks.read import Store, make_store
from zb_hdf5 import Loader

#: MiB of the tokens of a source.
MIB = 200
PORT = 8391
UNDER_WAY = 16
BAR = 0.8
TITLES = ("Behind HTTP, without delay",)
NOTES = {
    TITLES[
        0
    ]: f"A store on this machine behind nginx, {UNDER_WAY} reads under way, against bare reads of the same client."
}


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder by nginx on the loopback device, and yield the URL of its store."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        raise m.UnavailableRow("needs nginx (Debian: nginx-light)")
    folder.chmod(0o755)
    work = folder / "nginx"
    work.mkdir()
    temporary = "".join(f"{n}_temp_path {work}/{n};" for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (work / "nginx.conf").write_text(
        f"user root; daemon off; pid {work}/pid; error_log {work}/error.log;\nevents {{ worker_connections 1024; }}\n"
        f"http {{ access_log off; sendfile on; keepalive_requests 1000000; {temporary}\n"
        f"server {{ listen 127.0.0.1:{PORT}; location / {{ root {folder}; }} }} }}\n"
    )
    command = [nginx, "-p", str(work), "-c", str(work / "nginx.conf")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield f"http://127.0.0.1:{PORT}/store"
    finally:
        process.terminate()
        process.wait(10)


def bare(url: str, folder: str, epoch: int) -> m.Figures:
    """Read and widen all batches in global order, by `get_range` of the client in threads."""
    import obstore

    store = Store(Path(folder) / "store")
    client = obstore.store.from_url(url, client_options={"allow_http": True})
    names = [Path(file.name).name for file in store.files]
    length = m.BATCH_TOKENS * store.dtype.itemsize

    def read(shard: int, k: int) -> torch.Tensor:
        found = obstore.get_range(client, names[shard], start=store.offsets[shard][k], length=length)
        return torch.from_numpy(np.frombuffer(found, store.dtype).astype(np.int64))

    def batches() -> Iterator[torch.Tensor]:  # `map` begins to read at its call
        with ThreadPoolExecutor(UNDER_WAY) as pool:
            yield from pool.map(lambda place: read(*place), store.order(epoch))

    return {m.LATER: m.us_of(batches())}


def load(url: str, epoch: int, options: dict[str, Any]) -> m.Figures:
    with Loader(url, rank=0, world_size=1, **options) as loader:
        loader.set_epoch(epoch)
        return {m.LATER: m.us_of(loader)}


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the one table."""
    folder = run.folder
    build = run.builds[0]
    m.write_tokens(folder / "tokens.npy", run.batches * m.BATCH_SIZE)
    make_store(folder / "tokens.npy", folder / "store", shards=4)
    with serve(folder) as url:
        floor = m.Way(f"bare, {UNDER_WAY} reads under way", m.way_of(build, "bare", url, folder, 0))
        unchecked = m.way_of(build, "load", url, 0, {"verify": "none"})
        ways = [
            floor,
            m.Way("Loader", m.way_of(build, "load", url, 0, {}), floor.name, {m.LATER: BAR}),
            m.Way('Loader, verify="none"', unchecked, floor.name),
            *(m.Way("Loader, old", m.way_of(old, "load", url, 0, {}), floor.name) for old in run.builds[1:]),
        ]
        yield m.compare(run.titles[0], ways, run.rounds)
