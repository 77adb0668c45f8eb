"""Prints what users meet: public names, signatures, help, and the exit codes of commands.

    python tests/surface.py > tests/data/surface.txt

The file is committed: each difference is then reviewed. PYTHONPATH chooses another build.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from old_and_new import make_more_stores, make_sources, make_stores, zb


def signatures() -> Iterator[str]:
    """Yield a line for each public name, and for each public method of a class."""
    package = importlib.import_module("zb_hdf5")
    for name in sorted(package.__all__):
        thing = getattr(package, name)
        if not inspect.isclass(thing):
            yield f"{name}{_signature(thing)}"
            continue
        yield f"{name}({', '.join(base.__name__ for base in thing.__bases__)}){_signature(thing)}"
        for method in sorted(name for name in vars(thing) if not name.startswith("_")):
            value = inspect.getattr_static(thing, method)
            yield f"    .{method}{_signature(getattr(value, '__func__', value))}"


def _signature(thing: Any) -> str:
    try:
        return re.sub("<function .*? at 0x.*?>", "...", str(inspect.signature(thing))) if callable(thing) else ""
    except (TypeError, ValueError):
        return "(...)"


def helps(command: Any = None, name: str = "zb") -> Iterator[str]:
    """Yield the help of each command."""
    click = importlib.import_module("click")
    command = importlib.import_module("zb_hdf5.commands.zb").zb if command is None else command
    with click.Context(
        command, info_name=name, terminal_width=120, max_content_width=120, show_default=True
    ) as context:
        yield f"$ {name} --help\n{command.get_help(context)}\n"
        for each in command.list_commands(context) if hasattr(command, "list_commands") else []:
            yield from helps(command.get_command(context, each), f"{name} {each}")


#: Commands whose exit codes are noted.
COMMANDS = """
verify STORES/h5
verify STORES/flipped.h5
verify STORES/short.h5
verify STORES/bare.batch
verify STORES/nothing
verify SRC/text
info STORES/h5
info STORES/short.h5
info SRC/text/a.jsonl
repair STORES/flipped.h5 --force
repair STORES/lone.h5
index rebuild STORES/h5
index merge STORES/h5
convert npy-to-hdf5 SRC/records STORES/h5 --seq-len 16
convert npy-to-hdf5 SRC/records STORES/n --seq-len 17
convert npy-to-hdf5 SRC/records STORES/n --vocab-size 9 --seq-len 16
convert npy-to-hdf5 SRC/text STORES/n
convert npy-to-hdf5 SRC/records STORES/n --codec lzma
convert hdf5-to-npy STORES/flipped.h5 STORES/n
convert jsonl-to-hdf5 SRC/text STORES/n --tokenizer nonsense
show STORES/h5 --batch 9999
show STORES/h5 --batch 0 --json
which STORES/h5 --batch 9999
which STORES/h5 --step 1
nonsense
""".strip().splitlines()


def exits(sources: Path, stores: Path) -> Iterator[str]:
    """Yield a line for each of some commands: its exit code, and the last line that it prints on stderr."""
    flipped, cut, lone = stores / "flipped.h5", stores / "short.h5", stores / "bare.batch"
    content = bytearray((stores / "lone.h5").read_bytes())
    content[-5000] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(content[: len(content) // 2])
    lone.write_bytes((stores / "lone.batch").read_bytes())
    for line in COMMANDS:
        code, _, errors = zb(*line.replace("STORES", str(stores)).replace("SRC", str(sources)).split())
        last = ["", *errors.strip().splitlines()][-1].replace(str(stores), "STORES").replace(str(sources), "SRC")
        yield f"{code}  zb {line}\n       {last}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # worker processes import what lies in the current folder
        sources, stores = Path(folder) / "sources", Path(folder) / "stores"
        make_sources(sources)
        make_stores(sources, stores)
        make_more_stores(sources, stores)
        print("\n".join([*signatures(), "", *helps(), *exits(sources, stores)]))
