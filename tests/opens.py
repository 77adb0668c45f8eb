"""How often each file is opened when a path of each kind is used: by `strace`, which sees the opens of HDF5 too.

    python tests/opens.py [KIND ...]

The command prints a table of the kinds of `pins.py`: of each use the most opens of one file of ids, of one index or
sidecar, and of all files that are not files of ids.
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
from pathlib import Path
from typing import Any, Final, NamedTuple

from processes import environment

#: A path that is never there: to open it begins the trace of a case.
MARK: Final = "/no-such-folder/case/"
#: The uses of a path that are traced.
USES: Final = ("Loader", "reader", "info", "show", "verify", "convert")
#: A line of the trace; that of an open which another thread interrupts has no result.
_OPENED: Final = re.compile(
    r'open(?:at)?\((?:AT_FDCWD[^,]*, )?"([^"]+)", ([A-Z_|]+)(?:, \d+)?(?: <unfinished|\)\s+= (-?\d+))'
)


def can_trace() -> bool:
    """Return whether `strace` is here, and may follow a process."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", os.devnull, "true"], check=False, capture_output=True).returncode == 0


def opens_of(folder: Path, kinds: list[str]) -> dict[str, dict[str, Counter[str]]]:
    """Return kind -> use -> how often each file below a folder is opened; all in one process that strace follows."""
    trace = folder / "trace"
    program = [sys.executable, __file__, "--under-strace", str(folder), *kinds]
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


def ranks_of(folder: Path, path: Path, world_sizes: Sequence[int], **options: Any) -> dict[int, list[Traced]]:
    """Return world size -> the calls of each rank below a path, in an epoch of a real job of so many processes.

    Nothing of the path is known to them: a copy of it has made the process from which they fork import all modules.
    """
    program = [sys.executable, Path(__file__).parent / "programs" / "job_of_ranks.py"]
    arguments = [path, twin_of(path, folder / "twin"), json.dumps(options), *map(str, world_sizes)]
    how = ["-ff", "-y", "-qq", "-s", "0", "-e", f"trace={_CALLS}", "-o", folder / "rank"]
    subprocess.run(["strace", *how, *program, *arguments], check=True, env=environment(), timeout=300)
    below = str(path if path.is_dir() else path.with_suffix(""))
    found: dict[int, dict[int, Traced]] = {size: {} for size in world_sizes}
    for trace in folder.glob("rank.*"):
        _, mark, after = trace.read_text(errors="replace").partition(MARK)
        if mark:
            opening, _, steps = after.partition(MARK)
            size, rank, _ = opening.split("/", 2)
            calls = (_calls(part.splitlines(), below) for part in (opening, steps))
            found[int(size)][int(rank)] = Traced(*calls)
    return {size: [ranks[rank] for rank in range(size)] for size, ranks in found.items()}


def _calls(lines: list[str], path: str) -> Calls:
    opens = [match for match in map(_OPENED.search, lines) if match and match[1].startswith(path)]
    looks = [match for match in map(_LOOKED.match, lines) if match and match[1].startswith(path)]
    reads = [int(match[2]) for match in map(_READ.match, lines) if match and match[1].startswith(path)]
    large = [size for size in reads if size > 1]
    return Calls(len(opens), len(looks), len(large), sum(large))


def use(kind: Any, name: str, folder: Path) -> None:
    """Use a path as one of `USES` does."""
    from commandline import run_zb
    from reading import reading

    from zb_hdf5 import Loader, ZbError, convert, open_reader

    path = folder / "kinds" / kind.path
    options = reading(kind.options)
    if name == "Loader":
        order = {"shuffle": "sequential"} if kind.grows else {}  # the only one of batches that are still to come
        with Loader(path, **options, **order, **kind.shape, rank=0, world_size=1) as loader:
            next(iter(loader))
    elif name == "reader":
        with open_reader(path, **options, **kind.shape) as reader:
            reader.read_batch(0)
    elif name == "convert":
        given = {key: value for key, value in kind.options.items() if key not in ("split", "backend")}
        with contextlib.suppress(*([ZbError] if kind.grows else [])):  # a store that grows is refused
            convert(path, "hdf5", folder / "out", force=True, workers=1, **given, **_shape_of(kind))
    else:
        from pins import arguments_of

        run_zb(name, path, *arguments_of(kind, name))


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


def _run(folder: Path, chosen: list[str]) -> None:
    import pins

    pins.make_kinds(folder / "kinds")
    for kind, each in pins.kinds().items():
        if each.digests or (chosen and kind not in chosen):
            continue
        for name in USES:
            _marked(kind, name)
            with _quiet():
                use(each, name, folder)
        _marked("other", "all")


def _table(found: dict[str, dict[str, Counter[str]]]) -> Iterator[str]:
    yield f"{'kind':22}" + "".join(f"{name:>14}" for name in USES)
    for kind, uses in found.items():
        if kind != "other":
            cells = [_cell(uses.get(name, Counter())) for name in USES]
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
        _run(Path(sys.argv[2]), sys.argv[3:])
    else:
        with tempfile.TemporaryDirectory() as place:
            print(*_table(opens_of(Path(place), sys.argv[1:])), sep="\n")
