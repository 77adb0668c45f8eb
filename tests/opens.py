"""How often each file is opened when a path of each kind is used: by `strace`, which sees the opens of HDF5 too.

    python tests/opens.py [KIND ...]

The command prints a table of the kinds of `pins.py`, and of those that a conversion alone reads: of each use the most
opens of one file, for each ending of files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from processes import environment

#: A path that is never there: to open it begins the trace of a case.
MARK: Final = "/no-such-folder/case/"
#: The uses of a path that are traced; those that write a file beside the tokens come last.
USES: Final = (
    *("Loader", "reader", "mixture", "info", "show", "which", "verify", "convert"),
    *("report", "doctor", "plan", "stage", "epoch", "index"),
)
#: The option by which `zb info` tells the epoch of a loader, too.
EPOCH: Final = ("--world-size", 2)
#: A use that opens a path anew for each setting of the loader and each round that it times.
TIMED: Final = "bench"
#: The commands among them that take the shape of windows over a stream, and the options that each one needs.
SHAPED: Final = ("which", "show", TIMED, "plan", "stage", "epoch")
NEEDED: Final[dict[str, tuple[Any, ...]]] = {TIMED: ("--seconds", 1), "plan": ("--ranks", 2)}
#: Processes that read one file in several parts.
WORKERS: Final = 2
#: Kinds of paths that are read once, by a conversion alone: their places, and the options of the conversion.
ONCE: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "text-jsonl": ("sources/text", {"tokenizer": "byte"}),
    "text-parquet": ("sources/parquet", {"tokenizer": "byte"}),
    "mds": ("once/mds/ndarray", {}),
    "litdata": ("once/litdata/array", {}),
    "ids-saved": ("once/hf/saved", {}),
    "ids-jsonl": ("once/hf/corpus.jsonl", {}),
    "ids-parquet": ("once/hf/corpus.parquet", {}),
    "ragged": ("once/ragged", {}),
    "text-gzip": ("once/text/a.jsonl.gz", {"tokenizer": "byte"}),
    "text-plain": ("once/text/a.txt", {"tokenizer": "byte"}),
    "text-workers": ("once/groups/text.parquet", {"tokenizer": "byte", "shards": 4, "workers": WORKERS}),
    "ids-workers": ("once/groups/ids.parquet", {"shards": 4, "workers": WORKERS}),
}
#: A line of the trace; that of an open which another thread interrupts has no result.
_OPENED: Final = re.compile(
    r'open(?:at)?\((?:AT_FDCWD[^,]*, )?"([^"]+)", ([A-Z_|]+)(?:, \d+)?(?: <unfinished|\)\s+= (-?\d+))'
)


def can_trace() -> bool:
    """Return whether `strace` is here, and may follow a process."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", os.devnull, "true"], check=False, capture_output=True).returncode == 0


def opens_of(folder: Path, kinds: list[str], *more: str) -> dict[str, dict[str, Counter[str]]]:
    """Return kind -> use -> how often each file below a folder is opened; all in one process that strace follows.

    Parameters
    ----------
    kinds
        The kinds of paths; []: all.
    more
        Uses besides `USES`.
    """
    trace = folder / "trace"
    program = [sys.executable, __file__, "--under-strace", str(folder), ",".join((*USES, *more)), *kinds]
    subprocess.run(["strace", "-f", "-qq", "-e", "trace=open,openat", "-o", trace, *program], check=True)
    found: dict[str, dict[str, Counter[str]]] = {}
    counts: Counter[str] = Counter()
    for line in trace.read_text(errors="replace").splitlines():
        match = _OPENED.search(line)
        if match is None:
            continue
        path, flags, descriptor = match.groups()
        if path.startswith(MARK):
            kind, use = path.removeprefix(MARK).split("/")
            counts = found.setdefault(kind, {}).setdefault(use, Counter())
        elif int(descriptor or 0) >= 0 and "O_DIRECTORY" not in flags and path.startswith(f"{folder}/kinds/"):
            counts[path.removeprefix(f"{folder}/kinds/")] += 1
    return found


class Calls(NamedTuple):
    """The calls of one process below a path.

    Attributes
    ----------
    opens
        Opened files and folders.
    looks
        Facts that were asked for by a path: of a file, a folder or a file system.
    reads, num_bytes
        Reads, and their bytes; the looks for a page in memory are of one byte, and none of them.
    """

    opens: int
    looks: int
    reads: int
    num_bytes: int

    @classmethod
    def of(cls, processes: Iterable[Calls]) -> Calls:
        """Return the calls of several processes together."""
        return cls(*map(sum, zip(*processes, strict=True)))


class Traced(NamedTuple):
    """The calls of a rank of a job: until its loader is there, and in the steps of an epoch."""

    opening: Calls
    steps: Calls


#: Calls of a process that are followed; with -y each descriptor has its path.
_CALLS: Final = "open,openat,stat,lstat,newfstatat,statx,statfs,read,readv,pread64,preadv,preadv2"
_READ: Final = re.compile(r"^p?read\w*\(\d+<([^>]+)>.*\) = (\d+)$")
_LOOKED: Final = re.compile(r'^(?:statfs|stat|lstat|newfstatat|statx)\((?:AT_FDCWD[^,]*, )?"([^"]+)"')


def twin_of(path: Path, folder: Path) -> Path:
    """Return a copy of some data in a new folder; of a lone file with the files of other endings beside it."""
    folder.mkdir(parents=True)
    if path.is_dir():
        shutil.copytree(path, folder / path.name)
    else:
        for each in path.parent.glob(f"{path.stem}.*"):
            shutil.copy(each, folder)
    return folder / path.name


def bring_into_memory(folder: Path) -> None:
    """Write the files of a folder to the disk, and read them: then none of their pages is waited for.

    A loader that waits for a page asks once for the file system that has it.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("r+b") as opened:
                os.fsync(opened.fileno())
                opened.read()


def ranks_of(
    folder: Path, jobs: dict[str, tuple[Path, dict[str, Any]]], world_sizes: Sequence[int]
) -> dict[str, dict[int, list[Traced]]]:
    """Return job -> world size -> the calls of each rank below a path, in an epoch of a real job of so many processes.

    Nothing of the path is known to them: a copy of it has made the process from which they fork import all modules.

    Parameters
    ----------
    jobs
        Name -> its path, and the options of its loaders. All fork from one process.
    """
    given = {}
    for name, (path, options) in jobs.items():
        bring_into_memory(path if path.is_dir() else path.parent)
        given[name] = [str(path), str(twin_of(path, folder / "twins" / name)), options]
    (folder / "traces").mkdir()
    program = [sys.executable, Path(__file__).parent / "programs" / "job_of_ranks.py", json.dumps(given)]
    how = ["-ff", "-y", "-qq", "-s", "0", "-e", f"trace={_CALLS}", "-o", folder / "traces" / "rank"]
    subprocess.run(["strace", *how, *program, *map(str, world_sizes)], check=True, env=environment(), timeout=300)
    found: dict[str, dict[int, dict[int, Traced]]] = {name: {size: {} for size in world_sizes} for name in jobs}
    for trace in (folder / "traces").iterdir():
        _, mark, after = trace.read_text(errors="replace").partition(MARK)
        if mark:
            opening, _, steps = after.partition(MARK)
            name, size, rank, _ = opening.split("/", 3)
            path = jobs[name][0]
            below = str(path if path.is_dir() else path.with_suffix(""))
            calls = (_calls(part.splitlines(), below) for part in (opening, steps))
            found[name][int(size)][int(rank)] = Traced(*calls)
    return {
        name: {size: [ranks[rank] for rank in range(size)] for size, ranks in sizes.items()}
        for name, sizes in found.items()
    }


def _calls(lines: list[str], path: str) -> Calls:
    opens = [match for match in map(_OPENED.search, lines) if match and match[1].startswith(path)]
    looks = [match for match in map(_LOOKED.match, lines) if match and match[1].startswith(path)]
    reads = [int(match[2]) for match in map(_READ.match, lines) if match and match[1].startswith(path)]
    large = [size for size in reads if size > 1]
    return Calls(len(opens), len(looks), len(large), sum(large))


def use(kind: Any, name: str, folder: Path) -> None:
    """Use a path as one of `USES` does."""
    from reading import reading

    from zb_hdf5 import Loader, MixedLoader, ZbError, convert, open_reader

    path = folder / "kinds" / kind.path
    options = reading(kind.options)
    order = {"shuffle": "sequential"} if kind.grows else {}  # the only one of batches that are still to come
    if name == "Loader":
        with Loader(path, **options, **order, **kind.shape, rank=0, world_size=1) as loader:
            next(iter(loader))
    elif name == "mixture":
        other = folder / "kinds" / "other" / kind.path  # a copy of the same path
        sources = {"one": path, "other": other}
        weights = {"one": 0.5, "other": 0.5}
        with MixedLoader(sources, weights, **options, **order, **kind.shape, rank=0, world_size=1) as loader:
            steps = iter(loader)
            next(steps), next(steps)
    elif name == "reader":
        with open_reader(path, **options, **kind.shape) as reader:
            reader.read_batch(0)
    elif name == "convert":
        given = {key: value for key, value in kind.options.items() if key not in ("split", "backend")}
        with contextlib.suppress(*([ZbError] if kind.grows else [])):  # a store that grows is refused
            convert(path, "hdf5", folder / "out", force=True, workers=1, **given, **_shape_of(kind))
    else:
        _command(kind, name, path, folder)


def _command(kind: Any, name: str, path: Path, folder: Path) -> None:
    """Run a command of `zb` about a path."""
    from commandline import run_zb
    from pins import COMMANDS, arguments_of

    if name == "index":  # no digests are made of fields
        kind = replace(kind, options={key: value for key, value in kind.options.items() if key != "field_channels"})
    arguments = arguments_of(kind, name if name in COMMANDS else "info")
    if name in SHAPED and name not in COMMANDS:
        arguments += [word for key, value in kind.shape.items() for word in (f"--{key.replace('_', '-')}", value)]
    if name == "report":
        run_zb("report", path, *arguments, "-o", folder / "report.html", "--force")
    elif name == "epoch":
        run_zb("info", path, *arguments, *EPOCH)
    elif name == "stage":
        run_zb("stage", path, folder / "cache", *arguments, "--ranks", "0", "--world-size", 1)
        shutil.rmtree(folder / "cache", ignore_errors=True)
    elif name == "index":
        if path.is_dir() and (path / "shards.json").exists():
            run_zb("index", "rebuild", path, "--force")
        elif path.suffix == ".batch":
            run_zb("index", "crc32", path)
        else:
            run_zb("index", "digests", path, *arguments, "-o", folder / "digests.json", "--force")
    else:
        run_zb(name, path, *arguments, *NEEDED.get(name, ()))


def _shape_of(kind: Any) -> dict[str, Any]:
    return {key: value for key, value in kind.shape.items() if key != "batch_size"}


def _marked(kind: str, name: str) -> None:
    with contextlib.suppress(OSError):
        os.open(f"{MARK}{kind}/{name}", os.O_RDONLY)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _run(folder: Path, uses: list[str], chosen: list[str]) -> None:
    import pins

    from zb_hdf5 import convert

    pins.make_kinds(folder / "kinds")
    shutil.copytree(folder / "kinds", folder / "other")
    (folder / "other").rename(folder / "kinds" / "other")
    _make_once(folder / "kinds" / "once")
    for kind, each in pins.kinds().items():
        if each.digests or (chosen and kind not in chosen):
            continue
        for name in uses:
            _marked(kind, name)
            with _quiet():
                use(each, name, folder)
        _marked("other", "all")
    for kind, (path, options) in ONCE.items():
        if chosen and kind not in chosen:
            continue
        _marked(kind, "convert")
        with _quiet():
            convert(folder / "kinds" / path, "stream", folder / "out", force=True, **{"workers": 1, **options})
        _marked("other", "all")


def _make_once(folder: Path) -> None:
    """Write the kinds of `ONCE`."""
    import gzip

    import golden
    import h5py
    import numpy as np
    import pyarrow
    from pyarrow import parquet

    shutil.copytree(golden.DATA / "trainers", folder)
    (folder / "ragged").mkdir()
    for number in range(2):
        with h5py.File(folder / "ragged" / f"{number}.h5", "w") as h5:
            h5["input_ids"] = np.arange(1000, dtype=np.uint16)
            h5["offsets"] = np.arange(0, 1001, 50)
    (folder / "text").mkdir()
    (folder / "text" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000))
    (folder / "text" / "a.txt").write_bytes(b"one\n" * 1000)
    (folder / "groups").mkdir()
    for name, column, row in (("text", "text", "one"), ("ids", "input_ids", [1, 2, 3])):
        table = pyarrow.table({column: [row] * 800})
        parquet.write_table(table, folder / "groups" / f"{name}.parquet", row_group_size=100)


def _table(found: dict[str, dict[str, Counter[str]]]) -> Iterator[str]:
    yield f"{'kind':22}" + "".join(f"{name:>14}" for name in (*USES, TIMED))
    for kind, uses in found.items():
        if kind != "other":
            cells = [_cell(uses.get(name, Counter())) for name in (*USES, TIMED)]
            yield f"{kind:22}" + "".join(f"{cell:>14}" for cell in cells)


def _cell(counts: Counter[str]) -> str:
    """Return the most opens of one file, for each ending of files."""
    most: dict[str, int] = {}
    for path, count in counts.items():
        ending = Path(path).suffix or "-"
        most[ending] = max(most.get(ending, 0), count)
    return " ".join(f"{ending[1:4]}{count}" for ending, count in sorted(most.items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--under-strace"]:
        _run(Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:])
    else:
        with tempfile.TemporaryDirectory() as place:
            print(*_table(opens_of(Path(place), sys.argv[1:], TIMED)), sep="\n")
