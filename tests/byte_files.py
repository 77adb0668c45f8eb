"""Files of ids of one byte, of each kind that is read in place, and what a loader gives of them.

`tests/data/byte_states.json` has what the last build gave that read such ids as uint16 or uint32:

    python tests/byte_files.py

It is never made again: states that were taken then fit the ids as they are read now.
"""

import contextlib
import json
import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from golden import digests_of

from zb_hdf5 import DocumentLoader, Loader, MixedLoader, ReadAs, open_corpus

DATA = Path(__file__).with_name("data") / "byte_states.json"
NUM_RECORDS, LENGTH = 60, 24
#: All values that a byte has, those at its ends more often.
IDS = np.random.default_rng(8).integers(-20, 276, NUM_RECORDS * LENGTH).clip(0, 255).astype(np.uint8)
IDS.flags.writeable = False
SHAPE = {"batch_size": 4, "seq_len": LENGTH}
BARE = {"read_as": ReadAs(source_dtype="uint8")}
STEPS_BEFORE_STATE = 5
#: Kind of file -> its name, and the arguments of whoever opens it.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "npy-stream": ("stream.npy", SHAPE),
    "npy-records": ("records.npy", {"batch_size": 4}),
    "npy-folder": ("many", SHAPE),
    "raw": ("raw.bin", {**SHAPE, **BARE}),
    "megatron": ("pair.bin", SHAPE),
    "h5-stream": ("stream.h5", SHAPE),
    "h5-records": ("records.h5", {"batch_size": 4}),
    "h5-batches": ("batches.h5", {}),
    "h5-big-chunks": ("chunks.h5", {"batch_size": 4}),
    "h5-folder": ("many-h5", {"batch_size": 4}),
}
ORDERS: dict[str, dict[str, Any]] = {
    "global": {},
    "records": {"shuffle": "records", "targets": True},
    "block": {"shuffle": ("block", 3)},
    "sequential": {"shuffle": "sequential", "rank": 1, "world_size": 2},
}


def write_files(folder: Path) -> None:
    """Write the files of `FILES`."""
    records = IDS.reshape(NUM_RECORDS, LENGTH)
    np.save(folder / "stream.npy", IDS)
    np.save(folder / "records.npy", records)
    (folder / "raw.bin").write_bytes(IDS.tobytes())
    write_megatron(folder / "pair.bin", IDS, [0, *[20, 28] * (NUM_RECORDS // 2)])
    for name, array, how in (
        ("stream", IDS, {}),
        ("records", records, {}),
        ("batches", records.reshape(-1, 6, LENGTH), {"chunks": (1, 6, LENGTH)}),
        ("chunks", records, {"chunks": (7, 11), "compression": "gzip"}),
    ):
        with h5py.File(folder / f"{name}.h5", "w") as h5:
            h5.create_dataset("tokens", data=array, **how)
    for name in ("many", "many-h5"):
        (folder / name).mkdir()
    for number, part in enumerate(np.split(records, [7, 31])):
        np.save(folder / "many" / f"{number}.npy", part.reshape(-1))
        with h5py.File(folder / "many-h5" / f"{number}.h5", "w") as h5:
            h5["tokens"] = part


def write_megatron(path: Path, ids: Any, lengths: list[int], code: int = 1) -> None:
    """Write a `.bin` and its `.idx`, whose ids have code 1: uint8."""
    sizes = np.array(lengths, "<i4")
    starts = ((np.cumsum(sizes) - sizes) * ids.itemsize).astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(sizes) + 1)
    edges = np.arange(len(sizes) + 1, dtype="<i8")
    path.write_bytes(ids.tobytes())
    path.with_suffix(".idx").write_bytes(header + sizes.tobytes() + starts.tobytes() + edges.tobytes())


def cases() -> dict[str, Any]:
    """Return functions of a folder with the files, each of which makes a loader, by their names."""
    found: dict[str, Any] = {}
    for kind, (name, how) in FILES.items():
        for order, options in ORDERS.items():
            found[f"{kind}/{order}"] = partial(_loader, name, **{"rank": 0, "world_size": 1, **how, **options})
    found["documents"] = lambda folder: DocumentLoader(
        folder / "pair.bin", collate="pad", batch_size=2, rank=0, world_size=1
    )
    found["mixture"] = _mixture
    return found


def _loader(name: str, folder: Path, **options: Any) -> Loader:
    return Loader(folder / name, seed=3, **options)


def _mixture(folder: Path) -> MixedLoader:
    sources = {kind: folder / FILES[kind][0] for kind in ("npy-stream", "h5-records")}
    return MixedLoader(sources, {"npy-stream": 1, "h5-records": 2}, **SHAPE, rank=0, world_size=1)


def fingerprints(folder: Path) -> dict[str, list[str]]:
    """Return the fingerprints of each file: of its tokens, of its batches, and that by which a cache keeps them."""
    found = {}
    for kind, (name, how) in FILES.items():
        shape = {key: how.get(key) for key in ("batch_size", "seq_len")}
        with open_corpus(folder / name, **{key: how[key] for key in how if key == "read_as"}) as corpus:
            batches = corpus.batches(**shape)
            found[kind] = [corpus.fingerprint, batches.fingerprint, corpus.known_as.in_cache(batches)]
    return found


def result_of(make: Any, folder: Path) -> dict[str, Any]:
    """Return the digests of an epoch, a state in it, and the digests of the steps that follow the state."""
    with contextlib.closing(make(folder)) as loader:
        steps = iter(loader)
        for _ in range(STEPS_BEFORE_STATE):
            next(steps)
        state = json.loads(json.dumps(loader.state_dict()))
    with contextlib.closing(make(folder)) as loader:
        whole = digests_of(iter(loader))
    return {"whole": whole, "state": state, "rest": resumed(make, folder, state)}


def resumed(make: Any, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of the steps that follow a state."""
    with contextlib.closing(make(folder)) as loader:
        loader.load_state_dict(state)
        return digests_of(iter(loader))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        found = {case: result_of(make, Path(name)) for case, make in cases().items()}
        lines = [f" {json.dumps(case)}: {json.dumps(result)}" for case, result in found.items()]
        print(f'{{"fingerprints": {json.dumps(fingerprints(Path(name)))},\n"cases": {{')
        print(",\n".join(lines), "}}", sep="\n")
