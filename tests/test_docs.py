"""The README says what is so: its tables, commands, files and examples are compared with the code."""

import re
import subprocess
from pathlib import Path

import click
import numpy as np
import pytest

from zb_hdf5 import BACKENDS, open_writer, spec
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows_of(header):
    """Return the cells of each row of the table that begins with `header`."""
    lines = README.split(header)[1].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_batch_header_table_is_the_spec():
    documented = [(int(offset), kind, name) for offset, kind, name, _ in rows_of("| offset | type | field | value |")]
    assert tuple(documented) == spec.BATCH_HEADER_FIELDS


def test_hdf5_tables_are_the_spec():
    kinds = {"uint64": "<u8", "uint8": "|u1", "S64": "|S64"}
    documented = {name: kinds[kind] for name, kind, _ in rows_of("| attribute of `batches` | type | what |")}
    assert documented == {name: dtype.str for name, dtype in spec.BATCHES_ATTRIBUTES.items()}
    assert [row[0] for row in rows_of("| object | shape | what |")] == [spec.BATCHES, spec.CRC32]
    kinds |= {"int64": "<i8", "uint32": "<u4"}
    documented = {name: kinds[kind] for name, kind, _ in rows_of("| attribute of `tokens` | type | what |")}
    assert documented == {name: dtype.str for name, dtype in spec.TOKENS_ATTRIBUTES.items()}
    stream = [row[0] for row in rows_of("| object of a stream | shape | what |")]
    assert stream == [spec.TOKENS, spec.DOC_OFFSETS, spec.CRC32]
    text = README.split("The root group carries")[1].split("\n\n")[0]
    assert set(spec.ROOT_ATTRIBUTES) <= set(re.findall(r"`(\w+)`", text))


def test_backends_table_is_the_registry():
    documented = {row[0]: row[1] for row in rows_of("| backend | files | access | for |")}
    assert documented == {name: backend.suffix for name, backend in BACKENDS.items()}


def commands_of(group, path):
    """Return the names of all commands of a group and of the groups in it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{path} {name}")
        else:
            yield f"{path} {name}"


def test_every_command_is_documented_and_every_documented_command_exists():
    documented = {row[0] for row in rows_of("| command | does |")}
    assert documented == {*commands_of(convert, "convert"), *commands_of(zb, "zb")}


def test_architecture_names_every_file():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = [name for name in listed if re.fullmatch(r"(zb_hdf5|converters)/\w+\.py", name)]
    files = files or [str(path.relative_to(ROOT)) for path in ROOT.glob("zb_hdf5/*.py")]
    chapter = README.split("## Architecture")[1].split("## Development")[0]
    for folder in ("zb_hdf5", "converters"):
        block = re.search(rf"^{folder}/.*\n((?:  .*\n)+)", chapter, re.MULTILINE)[1]
        documented = set(re.findall(r"^  (\w+\.py)", block, re.MULTILINE))
        present = {Path(name).name for name in files if name.startswith(folder)} - {"__init__.py"}
        assert documented == present


def test_python_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    tokens = np.arange(2 * 32 * 512, dtype=np.uint16).reshape(2, 32, 512)
    with open_writer("train-h5.h5", batch_size=32, seq_len=512, dtype="uint16") as writer:
        writer.write(tokens)
    Path("train-h5").symlink_to("train-h5.h5")
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    Path("text").mkdir()
    for name in ("shard_00000", "shard_00001"):
        parquet.write_table(table({"text": ["once upon a time"] * 5000}), f"text/{name}.parquet")
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 4
    seen = []
    for example in examples:
        exec(example, {"step": seen.append, "tokenized": lambda: tokens, "documents": lambda: tokens[0]})
    assert len(seen) == 3 * len(tokens)


@pytest.mark.parametrize("name", ["demo", "test", "lint", "bench"])
def test_documented_make_targets_exist(name):
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
