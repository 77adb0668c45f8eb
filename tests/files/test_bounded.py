"""Lines, and files that are read whole: none takes more memory than the bound, and FIFOs and devices are not opened."""

import gzip
import io
import json
import os
import socket

import numpy as np
import pytest
from commandline import one_error, run_zb
from interpreter import run_program

from zb_hdf5 import ArgumentError, FormatError, convert, write_digests
from zb_hdf5.files.bounded import LINE_PART_BYTES, lines_of
from zb_hdf5.text.training import train_tokenizer

#: Runs a command with so much more memory than it begins with.
COMMAND = """
import resource, sys
import numpy, pyarrow, pyarrow.parquet, h5py
from zb_hdf5.commands.zb import zb
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
zb(sys.argv[2:], prog_name="zb")
"""
MORE_BYTES = 700 << 20
SPARSE_BYTES = 3 << 30


def lines(data, **options):
    return list(lines_of(io.BytesIO(data), "x", **options))


def sparse(path):
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def packed(path):
    """Write a line of zeros that is longer than the bound, in 300 KiB."""
    with gzip.open(path, "wb", compresslevel=6) as file:
        for _ in range(300):
            file.write(bytes(1 << 20))


def packed_by_zstd(path):
    """Write a line of 3 GiB of zeros, in 300 KiB."""
    packer = pytest.importorskip("zstandard").ZstdCompressor()
    path.write_bytes(packer.compress(bytes(64 << 20)) * 48)


def test_a_long_line_is_in_memory_once(tmp_path):
    """Its text and the value that is parsed of it are; its bytes, and the parts that it was read in, are not."""
    size = 100 << 20
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(100):
            file.write(b"word " * (size // 500))
        file.write(b'"}\n')
    code = """
import sys
from pathlib import Path
from zb_hdf5.text.json_lines import JsonLinesFile
file = JsonLinesFile(Path(sys.argv[1]))
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
before = peak()
[block] = file.blocks()
print(len(block.texts[0]), peak() - before)
"""
    length, grown = map(int, run_program(code, tmp_path / "a.jsonl").stdout.split())
    assert length == size // 500 * 500
    assert grown < 2.5 * size


#: File -> the command that reads it, from its folder.
TO_STREAM = ("--to", "stream", "--tokenizer", "byte", "--workers", 1)
GIANTS = {
    "a.jsonl": (sparse, ("convert", "a.jsonl", "out", *TO_STREAM)),
    "ids.jsonl": (sparse, ("convert", "ids.jsonl", "out", "--from", "hf", "--to", "stream")),
    "a.txt": (sparse, ("convert", "a.txt", "out", *TO_STREAM)),
    "a.json": (sparse, ("convert", "a.json", "out", *TO_STREAM)),
    "a.jsonl.zst": (packed_by_zstd, ("convert", "a.jsonl.zst", "out", *TO_STREAM)),
    "a.jsonl.gz": (packed, ("convert", "a.jsonl.gz", "out", *TO_STREAM)),
    "hf/state.json": (sparse, ("convert", "hf", "out", "--from", "hf", "--to", "stream")),
    "hf/dataset_dict.json": (sparse, ("convert", "hf", "out", "--from", "hf", "--to", "stream")),
    "mds/index.json": (sparse, ("convert", "mds", "out", "--from", "mds", "--to", "stream")),
    "store/shards.json": (sparse, ("info", "store")),
    "tokenizer.json": (sparse, ("convert", "b.txt", "out", "--to", "stream", "--tokenizer", "hf:tokenizer.json")),
    "digests.json": (sparse, ("verify", "b.npy", "--digests", "digests.json")),
    "state.pt.json": (sparse, ("which", "store", "--state", "state.pt.json", "--step", 1)),
}


@pytest.mark.parametrize("name", GIANTS)
@pytest.mark.thin
def test_a_giant_that_is_read_whole_is_refused_in_little_memory(name, tmp_path):
    make, command = GIANTS[name]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "b.npy").write_bytes(b"")
    done = run_program(COMMAND, MORE_BYTES, *command, folder=tmp_path)
    assert done.returncode not in (0, -9), done.stdout
    assert done.stderr.startswith("Error: "), done.stderr
    assert (name in done.stderr, "at most 256.0 MiB, found" in done.stderr) == (True, True), done.stderr
    has_option = name.endswith((".jsonl", ".txt", ".jsonl.gz", ".jsonl.zst")) or name == "a.json"
    assert has_option == ("pass --max-line 1GiB" in done.stderr), done.stderr
    assert has_option != ("run 'export ZB_MAX_LINE=3GiB' first" in done.stderr), done.stderr
    assert not {word for word in ("Traceback", "expected JSON") if word in done.stderr}


def test_lines_are_those_of_the_file_however_long_they_are():
    for sizes in (
        (),
        (0,),
        (3, 0, 5),
        (LINE_PART_BYTES - 1, LINE_PART_BYTES, LINE_PART_BYTES + 1, 2 * LINE_PART_BYTES, 1),
    ):
        data = b"\n".join(b"x" * size for size in sizes)
        for each in (data, data + b"\n"):
            assert [bytes(line) for line in lines(each)] == list(io.BytesIO(each))
    assert lines(b"0123456789\n012345678", most=11) == [b"0123456789\n", b"012345678"]
    with pytest.raises(FormatError, match=r"at most 10 bytes, found a longer one from byte 3 on; .*max_line='1GiB'"):
        lines(b"12\n0123456789A", most=10)


#: File -> its text of 2 kB, and the command that reads it, once it has a tokenizer.
LONG = {
    "a.jsonl": (json.dumps({"text": "x" * 2000}) + "\n", ("convert", "a.jsonl", "out", *TO_STREAM)),
    "a.txt": ("x" * 2000, ("convert", "a.txt", "out", *TO_STREAM)),
    "ids.jsonl": (
        json.dumps({"input_ids": [7] * 1000}) + "\n",
        ("convert", "ids.jsonl", "out", "--from", "hf", "--to", "stream", "--workers", 1),
    ),
    "two.jsonl": (
        (json.dumps({"text": "x" * 2000}) + "\n") * 2,
        ("tokenizer", "train", "two.jsonl", "-o", "tok.json", "--vocab-size", 300),
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_an_option_moves_the_bound(name, tmp_path, monkeypatch):
    text, command = LONG[name]
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    message = one_error(run_zb(*command, "--max-line", "1kB"), 1)
    assert (f"{name}: expected a" in message, "at most 1000 bytes, found" in message) == (True, True), message
    assert message.endswith("if it is right, pass --max-line 1GiB to 'zb convert' or 'zb tokenizer train'")
    run_zb(*command, "--max-line", "4KiB", code=0)
    assert "'much' is not a size such as 512MB" in run_zb(*command, "--max-line", "much").output


#: The file that is read whole, and the command that reads it.
WHOLE = {
    "store/shards.json": ("info", "store"),
    "mds/index.json": ("convert", "mds", "out", "--from", "mds", "--to", "stream", "--workers", 1),
    "tok.json": ("convert", "a.txt", "out", "--to", "stream", "--tokenizer", "hf:tok.json", "--workers", 1),
    "a.npy.digests": ("verify", "a.npy", "--digests", "a.npy.digests"),
    "a.jsonl": ("convert", "a.jsonl", "out", *TO_STREAM),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_environment_moves_every_bound(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.arange(64, dtype=np.uint16))
    convert("a.npy", "hdf5", "store", batch_size=1, seq_len=64, workers=1)
    convert("a.npy", "mds", "mds", tokens_only=True, workers=1)
    write_digests("a.npy", "a.npy.digests")
    (tmp_path / "a.txt").write_text("x y x y\n" * 9)
    (tmp_path / "a.jsonl").write_text(LONG["two.jsonl"][0])
    train_tokenizer(["a.txt", "a.jsonl"], "tok.json", 300)
    monkeypatch.setenv("ZB_MAX_LINE", "40")
    message = one_error(run_zb(*WHOLE[name]), 1)
    assert f"{name}: expected a" in message
    assert "at most 40 bytes, found" in message
    if name != "a.jsonl":
        assert message.endswith("if it is right, run 'export ZB_MAX_LINE=1GiB' first")
    monkeypatch.setenv("ZB_MAX_LINE", "1GiB")
    run_zb(*WHOLE[name], code=0)
    monkeypatch.setenv("ZB_MAX_LINE", "much")
    assert "ZB_MAX_LINE: 'much' is not a size such as 512MB or 1GiB" in one_error(run_zb(*WHOLE[name]), 2)


def test_a_call_moves_the_bound_by_a_size_in_words(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(LONG["two.jsonl"][0])
    options = {"tokenizer": "byte", "workers": 1}
    with pytest.raises(FormatError, match=r"at most 1000 bytes, .* pass a larger bound, such as max_line='1GiB'"):
        convert(path, "stream", tmp_path / "out", max_line="1kB", **options)
    convert(path, "stream", tmp_path / "out", max_line=4096, **options)
    with pytest.raises(FormatError, match="at most 1000 bytes"):
        train_tokenizer(path, tmp_path / "tok.json", 300, max_line="1kB")


@pytest.mark.parametrize("source_format", ["parquet", "hf", "npy"])
def test_the_bound_of_a_line_is_refused_where_there_are_no_lines(source_format, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["text"], "input_ids": [[1, 2]]}), path)
    options = {"tokenizer": "byte"} if source_format == "parquet" else {}
    with pytest.raises(ArgumentError, match="max_line"):
        convert(path, "stream", tmp_path / "out", source_format=source_format, max_line="1GiB", **options)


def fifo(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


#: File -> the command that reads it: FIFOs would block, and a device never ends.
READ = {
    "a.jsonl": ("convert", "a.jsonl", "out", *TO_STREAM),
    "a.jsonl.gz": ("convert", "a.jsonl.gz", "out", *TO_STREAM),
    "a.txt": ("convert", "a.txt", "out", *TO_STREAM),
    "a.parquet": ("convert", "a.parquet", "out", *TO_STREAM),
    "ids.parquet": ("convert", "ids.parquet", "out", "--from", "hf", "--to", "stream"),
    "ids.arrow": ("convert", "ids.arrow", "out", "--to", "stream"),
    "ids.jsonl": ("convert", "ids.jsonl", "out", "--from", "hf", "--to", "stream"),
    "hf/state.json": ("convert", "hf", "out", "--from", "hf", "--to", "stream"),
    "hf/dataset_dict.json": ("convert", "hf", "out", "--from", "hf", "--to", "stream"),
    "mds/index.json": ("convert", "mds", "out", "--from", "mds", "--to", "stream"),
    "store/shards.json": ("info", "store"),
    "x.idx": ("convert", "x.bin", "out", "--from", "megatron", "--to", "stream"),
    "x.ds": ("convert", "x.ds", "out", "--to", "stream"),
    "y.ds.index": ("convert", "y.ds", "out", "--to", "stream"),
    "z.csv.gz": ("convert", "z.npy", "out", "--from", "olmo", "--source-dtype", "uint16", "--to", "stream"),
    "a.h5": ("convert", "a.h5", "out", "--to", "stream"),
    "b.h5": ("info", "b.h5"),
    "c.h5": ("verify", "c.h5"),
    "d.npy": ("info", "d.npy"),
    "e.jsonl": ("info", "e.jsonl"),
    "folder/a.jsonl": ("convert", "folder", "out", *TO_STREAM),
    "tokenizer.json": ("convert", "b.txt", "out", "--to", "stream", "--tokenizer", "hf:tokenizer.json"),
    "train.txt": ("tokenizer", "train", "train.txt", "-o", "tok.json", "--vocab-size", 300),
    "digests.json": ("verify", "z.npy", "--digests", "digests.json"),
    "state.json": ("which", "store", "--state", "state.json", "--step", 1),
    "sums": ("fetch", "http://localhost:9/{:05d}.npy", "-n", 1, "--sha256-file", "sums"),
}


def write_others(folder, name):
    """Write the files that a command needs beside one that is not a file."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / "b.txt").write_text("text")
    for each in ("x.bin", "y.ds", "z.npy"):
        (folder / each).write_bytes(bytes(8))


@pytest.mark.parametrize("make", [fifo, endless])
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_is_refused_before_it_is_opened(name, make, tmp_path, monkeypatch):
    write_others(tmp_path, name)
    make(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    done = run_program(COMMAND, MORE_BYTES, *READ[name], folder=tmp_path)  # which never ends if one is opened
    assert done.returncode not in (0, -9), done.stdout
    assert name.split("/")[0] in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", READ)
def test_a_socket_is_no_file(name, tmp_path, monkeypatch):
    write_others(tmp_path, name)
    monkeypatch.chdir((tmp_path / name).parent)  # the whole path of a socket may be too long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind((tmp_path / name).name)
    monkeypatch.chdir(tmp_path)
    result = run_zb(*READ[name])
    assert result.exit_code not in (0, 5), result.output
    found = "found none" if name == "tokenizer.json" else "found a FIFO, a socket or a device"
    assert f"{name}: expected a " in result.output
    assert found in result.output
