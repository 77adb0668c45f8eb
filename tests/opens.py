"""How often each file is opened when a path of each kind is used: by `strace`, which sees the opens of HDF5 too.

    python tests/opens.py [KIND ...]

The command prints a table of the kinds of `pins.py`: of each use the most opens of one file of ids, of one index or
sidecar, and of all files that are no files of ids.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

#: A path that is never there: to open it begins the trace of a case.
MARK: Final = "/no-such-folder/case/"
#: The uses of a path that are traced.
USES: Final = ("Loader", "reader", "info", "show", "verify", "convert")
#: A line of the trace; that of an open which another thread interrupts has no result.
_OPENED: Final = re.compile(
    r'open(?:at)?\((?:AT_FDCWD, )?"([^"]+)", ([A-Z_|]+)(?:, \d+)?(?: <unfinished|\)\s+= (-?\d+))'
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


def use(kind: Any, name: str, folder: Path) -> None:
    """Use a path as one of `USES` does."""
    from commandline import run_zb
    from reading import reading

    from zb_hdf5 import Loader, convert, open_reader

    path = folder / "kinds" / kind.path
    options = reading(kind.options)
    if name == "Loader":
        with Loader(path, **options, **kind.shape, rank=0, world_size=1) as loader:
            next(iter(loader))
    elif name == "reader":
        with open_reader(path, **options, **kind.shape) as reader:
            reader.read_batch(0)
    elif name == "convert":
        given = {key: value for key, value in kind.options.items() if key not in ("split", "backend")}
        with contextlib.suppress(Exception):
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
