"""`convert` and `zb` as commands: exit codes, streams, help, and what `zb info` and `zb verify` say."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys

import click
import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import converters.pipe
from converters.cli import convert
from zb_hdf5 import Loader, open_reader, open_writer
from zb_hdf5.cli import zb
from zb_hdf5.spec import INDEX_NAME

SEQ_LEN = 8
SHAPE = ("--batch-size", "4", "--seq-len", str(SEQ_LEN))
FILE_OF_STORE = {"h5-store": "shard-00001-of-00003.h5", "batch-store": "shard-00001-of-00003.batch"}


def run(group, *arguments):
    """Run a command; an exception that is not an exit is the test's failure."""
    return CliRunner().invoke(group, [str(argument) for argument in arguments], catch_exceptions=False)


def one_error(result):
    """Return the message of a failed command: all that it printed."""
    assert result.exit_code != 0
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("Error: ") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("Error: ").strip()


def batches(count):
    return np.arange(count * 4 * SEQ_LEN, dtype="<u4").reshape(count, 4, SEQ_LEN)


@pytest.fixture
def places(tmp_path):
    """The same 12 batches in everything that holds batches."""
    np.save(tmp_path / "in.npy", batches(12).reshape(-1, SEQ_LEN))
    made = {"npy": tmp_path / "in.npy"}
    for target, suffix in (("hdf5", ".h5"), ("batch", ".batch")):
        made[suffix[1:]] = tmp_path / f"one{suffix}"
        made[f"{suffix[1:]}-store"] = tmp_path / f"store-{target}"
        command = (f"npy-to-{target}", made["npy"])
        assert run(convert, *command, made[suffix[1:]], *SHAPE, "--no-shuffle").exit_code == 0
        store = made[f"{suffix[1:]}-store"]
        assert run(convert, *command, store, *SHAPE, "--no-shuffle", "--shards", 3).exit_code == 0
    return made


def flip_bit(path, number):
    """Damage one token of batch `number` of one file."""
    with open_reader(path) as reader:
        offset = reader.extents.offset(number) + 5
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def all_commands(group, path=()):
    """Yield (name, command) of a group and of everything below it."""
    yield " ".join(path) or group.name, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(all_commands(zb))
LEAVES = sorted(name for name, command in COMMANDS.items() if not isinstance(command, click.Group))


def arguments_of(name, places, out):
    """Return arguments with which a command succeeds."""
    if name.startswith("convert npy-to"):
        return (places["npy"], out, *SHAPE)
    if name.startswith(("convert parquet", "convert jsonl", "convert text", "tokenizer")):
        return text_arguments(name, out)
    if name.startswith("convert"):
        return (places["batch" if " batch-to" in name else "h5"], out)
    if name == "which":
        with contextlib.closing(Loader(places["h5-store"], rank=0, world_size=1)) as loader:
            (out.parent / "state.json").write_text(json.dumps(loader.state_dict()))
        return (places["h5-store"], "--state", out.parent / "state.json", "--step", 3)
    if name == "index merge":
        for job in range(2):
            command = ("hdf5-to-batch", places["h5-store"], out, "--shard-range", f"{job}/2")
            assert run(convert, *command).exit_code == 0
        return (out,)
    if name == "index rebuild":
        return (places["h5-store"], "--force")  # its index is valid
    if name == "fetch":  # what is there already needs no server
        (out.parent / "s_0.parquet").write_bytes(b"fetched")
        return ("http://localhost/s_{}.parquet", "-n", 1, "-o", out.parent)
    return (places["h5-store"],)


def text_arguments(name, out):
    """Return arguments with which a command that reads text succeeds."""
    texts = ["one document of text " * 5, "and another one " * 5]
    if name == "convert parquet-to-hdf5":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), source := out.parent / "in.parquet")
    elif name == "convert text-to-hdf5":
        (source := out.parent / "in.txt").write_text(texts[0])
    else:
        (source := out.parent / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if name == "tokenizer train":
        pytest.importorskip("tokenizers")
        pytest.importorskip("tiktoken")
        return (source, "-o", out.with_suffix(".json"), "--vocab-size", 300)
    return (source, out, "--tokenizer", "byte", *SHAPE)


# --- help ------------------------------------------------------------------------------------------------------


def test_all_the_commands_are_there():
    pairs = [(a, b) for a in ("npy", "hdf5", "batch") for b in ("npy", "hdf5", "batch") if a != b]
    assert {f"convert {a}-to-{b}" for a, b in pairs} | {"info", "verify", "demo"} <= set(LEAVES)


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_an_example(name, option):
    result = run(zb, *name.split(), option)
    assert result.exit_code == 0
    assert result.stderr == ""
    example = next(line.split("Example:")[1] for line in result.stdout.splitlines() if "Example:" in line)
    assert name.split()[-1] in example


@pytest.mark.parametrize("group", [zb, convert])
def test_a_groups_help_lists_its_commands_with_a_sentence_each(group):
    result = run(group, "--help")
    assert result.exit_code == 0
    listed = result.stdout.split("Commands:")[1].strip().splitlines()
    assert len(listed) == len(group.list_commands(click.Context(group)))
    assert all(len(line.split()) > 2 for line in listed)


def test_every_option_says_what_it_does():
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"


def test_zb_convert_is_the_same_group(places, tmp_path):
    assert zb.get_command(click.Context(zb), "convert") is convert
    assert run(zb, "convert", "npy-to-hdf5", places["npy"], tmp_path / "a.h5", *SHAPE).exit_code == 0
    assert run(convert, "npy-to-hdf5", places["npy"], tmp_path / "b.h5", *SHAPE).exit_code == 0
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_zb_says_its_version():
    result = run(zb, "--version")
    assert result.exit_code == 0
    assert "0.1" in result.stdout


# --- streams ---------------------------------------------------------------------------------------------------

REPORTING = [name for name in LEAVES if name != "demo"]  # a show for people, made of the other commands


@pytest.mark.parametrize("name", REPORTING)
def test_json_is_parseable_and_alone_on_stdout(name, places, tmp_path):
    result = run(zb, *name.split(), *arguments_of(name, places, tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == ""


@pytest.mark.parametrize("name", REPORTING)
def test_quiet_prints_nothing(name, places, tmp_path):
    result = run(zb, *name.split(), *arguments_of(name, places, tmp_path / "out"), "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("name", REPORTING)
def test_reports_go_to_stdout_in_aligned_lines(name, places, tmp_path):
    result = run(zb, *name.split(), *arguments_of(name, places, tmp_path / "out"))
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.count("  ") > 0
    assert "\x1b" not in result.stdout


def test_quiet_does_not_silence_errors(places, tmp_path):
    assert "exists" in one_error(run(convert, "npy-to-hdf5", places["npy"], places["h5"], *SHAPE, "--quiet"))


def test_the_json_of_a_conversion(places, tmp_path):
    result = run(convert, "npy-to-hdf5", places["npy"], tmp_path / "out", *SHAPE, "--shards", 3, "--json")
    report = json.loads(result.stdout)
    seconds = report.pop("seconds")
    assert seconds >= 0
    with open_reader(tmp_path / "out") as reader:
        digest = reader.sha256
    assert report == {
        "path": str(tmp_path / "out"), "batch_size": 4, "seq_len": SEQ_LEN, "dtype": "uint32", "num_batches": 12,
        "num_shards": 3, "tokens_in": 384, "tokens_stored": 384, "tokens_padded": 0, "tokens_dropped": {},
        "max_token": 383, "shuffle": "direct: 100% of a sample of the source are in the page cache", "sha256": digest,
        "padding_rows": 0, "extension": None,
    }  # fmt: skip


# --- exit codes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [
    (),
    ("no-such-command",),
    ("npy-to-hdf5",),
    ("npy-to-hdf5", "only-one"),
    ("npy-to-hdf5", "a", "b", "--batch-size", "0"),
    ("npy-to-hdf5", "a", "b", "--batch-size", "many"),
    ("npy-to-hdf5", "a", "b", "--dtype", "int8"),
    ("npy-to-hdf5", "a", "b", "--remainder", "keep"),
    ("npy-to-hdf5", "a", "b", "--vocab-size", "0"),
    ("npy-to-hdf5", "a", "b", "--seed", "-1"),
    ("npy-to-hdf5", "a", "b", "--shards", "0"),
    ("npy-to-hdf5", "a", "b", "--shard-size", "big"),
    ("npy-to-hdf5", "a", "b", "--no-such-option"),
    ("hdf5-to-batch", "a", "b", "c"),
    ("batch-to-hdf5", "a", "b", "--dataset", "d"),
])  # fmt: skip
def test_usage_errors_exit_2(arguments):
    result = run(convert, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr


def test_arguments_that_cannot_be_exit_2(places, tmp_path):
    huge = ("--batch-size", 2**20, "--seq-len", 2**20)
    assert run(convert, "npy-to-hdf5", places["npy"], tmp_path / "o", *SHAPE, "--seed", 2**64).exit_code == 2
    np.save(tmp_path / "wide.npy", np.zeros((1, 2**20), "<u2"))
    assert run(convert, "npy-to-hdf5", tmp_path / "wide.npy", tmp_path / "o", *huge).exit_code == 2


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_path_that_is_not_there_exits_2(command, tmp_path):
    result = run(zb, command, tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


@pytest.mark.parametrize("command", ["info", "verify"])
@pytest.mark.parametrize("content", [b"", b"hello", b"LLMBATCX" + bytes(5000)])
def test_an_unknown_file_exits_1(command, content, tmp_path):
    path = tmp_path / "what"
    path.write_bytes(content)
    result = run(zb, command, path)
    assert result.exit_code == 1
    assert f"{path}: no known file" in result.output


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_folder_that_is_no_store_exits_1(command, tmp_path):
    assert INDEX_NAME in one_error(run(zb, command, tmp_path))


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_header_alone_is_incomplete(command, places):
    os.truncate(places["batch"], 100)
    assert run(zb, command, places["batch"]).exit_code == 4


@pytest.mark.parametrize("kind", ["h5", "batch"])
@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_truncated_file_exits_4(kind, command, places):
    os.truncate(places[kind], places[kind].stat().st_size - 4096)
    result = run(zb, command, places[kind])
    assert result.exit_code == 4
    assert str(places[kind]) in result.output


def test_a_file_that_is_being_written_exits_5(places, tmp_path):
    for suffix, command in ((".h5", "npy-to-hdf5"), (".batch", "npy-to-batch")):
        path = tmp_path / f"busy{suffix}"
        with open_writer(path, batch_size=4, seq_len=SEQ_LEN) as writer:
            writer.write(batches(1))
            result = run(convert, command, places["npy"], path, *SHAPE)
            assert "another process is writing it" in one_error(result)
            assert result.exit_code == 5
        with open_reader(path) as reader:
            assert reader.num_batches == 1


def test_a_missing_filter_exits_5(tmp_path):
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as h5:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((1, 4, SEQ_LEN))
        plist.set_filter(32015 + 4242, h5py.h5z.FLAG_OPTIONAL, (1,))  # no such filter is registered
        space = h5py.h5s.create_simple((2, 4, SEQ_LEN))
        dataset = h5py.h5d.create(h5.id, b"tokens", h5py.h5t.STD_U32LE, space, plist)
        dataset.write_direct_chunk((0, 0, 0), b"compressed by another filter", filter_mask=0)
    result = run(convert, "hdf5-to-batch", path, tmp_path / "o.batch", "--dataset", "tokens")
    assert "filter" in one_error(result)
    assert result.exit_code == 5


@pytest.mark.parametrize(("error", "code", "text"), [
    (KeyboardInterrupt(), 130, "interrupted"),
    (MemoryError("17 PiB"), 1, "17 PiB"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
    (PermissionError(errno.EACCES, "Permission denied", "/precious"), 1, "/precious"),
])  # fmt: skip
def test_what_goes_wrong_underneath_is_one_message(error, code, text, places, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise type(error)(*error.args) if not getattr(error, "filename", None) else OSError(*error.args, error.filename)

    monkeypatch.setattr(converters.pipe, "convert", fail)
    result = run(convert, "npy-to-hdf5", places["npy"], tmp_path / "out", *SHAPE)
    assert text in one_error(result)
    assert result.exit_code == code


# --- zb info ---------------------------------------------------------------------------------------------------


def info(path, *options):
    result = run(zb, "info", path, "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["h5", "batch"])
def test_info_of_a_file(kind, places):
    found = info(places[kind])
    with open_reader(places[kind]) as reader:
        expected = [list(run) for run in reader.extents.runs]
        assert found["sha256"] == reader.sha256
        assert found["fingerprint"] == reader.fingerprint
    assert found["kind"] == "file"
    assert found["backend"] == {"h5": "hdf5", "batch": "batch"}[kind]
    assert found["state"] == "complete"
    assert (found["num_batches"], found["batch_size"], found["seq_len"]) == (12, 4, SEQ_LEN)
    assert (found["dtype"], found["tokens"], found["total_records"]) == ("uint32", 384, 48)
    assert found["bytes"] == places[kind].stat().st_blocks * 512
    assert found["layout"]["extents"] == expected
    assert found["layout"]["runs"] == 1
    assert found["layout"]["page_aligned"] is all(base % 4096 == stride % 4096 == 0 for base, stride, _ in expected)


@pytest.mark.parametrize("kind", ["h5-store", "batch-store"])
@pytest.mark.parametrize("by_index", [False, True])
def test_info_of_a_store(kind, by_index, places):
    found = info(places[kind] / INDEX_NAME if by_index else places[kind])
    assert found["kind"] == "store"
    assert found["shards"] == {"count": 3, "min_batches": 4, "max_batches": 4}
    assert (found["num_batches"], found["tokens"], found["access"]) == (12, 384, "mmap")
    assert len(found["sha256"]) == 64


def test_info_of_a_live_file(tmp_path):
    with open_writer(tmp_path / "x.h5", batch_size=4, seq_len=SEQ_LEN) as writer:
        writer.write(batches(5))
        found = info(tmp_path / "x.h5.partial")
        text = run(zb, "info", tmp_path / "x.h5.partial").stdout
    assert found["state"].startswith("growing")
    assert found["num_batches"] == 5
    assert found["access"] == "h5py"
    assert found["layout"] is None
    assert found["sha256"] is None
    assert "growing" in text


def compress(source, target):
    with h5py.File(source) as old, h5py.File(target, "w") as new:
        new.attrs.update(old.attrs)
        stored = old["batches"]
        made = new.create_dataset("batches", data=stored[:], chunks=stored.chunks, compression="gzip")
        for name, value in stored.attrs.items():
            made.attrs.create(name, value, dtype=np.asarray(value).dtype)
        old.copy("crc32", new)
    return target


def test_info_and_verify_of_a_compressed_file(places, tmp_path):
    path = compress(places["h5"], tmp_path / "small.h5")
    found = info(path)
    assert found["access"] == "h5py"
    assert found["layout"] is None
    assert found["sha256"] == info(places["h5"])["sha256"]
    assert "read through h5py" in run(zb, "info", path).stdout
    assert run(zb, "verify", path).exit_code == 0


def test_info_of_a_foreign_file(tmp_path):
    path = tmp_path / "foreign.h5"
    with h5py.File(path, "w") as h5:
        h5["tokens"] = batches(3)
    assert "--dataset" in one_error(run(zb, "info", path))
    assert info(path, "--dataset", "tokens")["num_batches"] == 3


def test_info_for_people_says_the_same(places):
    text = run(zb, "info", places["h5"]).stdout
    for part in ("hdf5 file, complete", "12 of 4 x 8 uint32", "384", "1 run", "mmap", "48"):
        assert part in text


# --- zb verify -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "checks"), [
    ("h5", ["crc32", "sha256"]),
    ("batch", []),
    ("h5-store", ["crc32", "sha256", "index"]),
    ("batch-store", ["crc32", "index"]),
])  # fmt: skip
def test_verify_says_what_it_compared(kind, checks, places):
    result = run(zb, "verify", places[kind], "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert [file["checks"] for file in report["files"]] == [checks] * len(report["files"])
    assert len(report["files"]) == (3 if "store" in kind else 1)
    assert sum(file["num_batches"] for file in report["files"]) == 12
    assert all(file["problem"] is None for file in report["files"])
    assert "files are as they were written" in run(zb, "verify", places[kind]).stdout


@pytest.mark.parametrize("kind", ["h5", "h5-store", "batch-store"])
@pytest.mark.parametrize("workers", [(), ("--workers", 1)])
def test_verify_names_the_first_bad_batch(kind, workers, places):
    bad = places[kind] / FILE_OF_STORE[kind] if "store" in kind else places[kind]
    flip_bit(bad, 3)
    flip_bit(bad, 1)
    result = run(zb, "verify", places[kind], *workers)
    assert result.exit_code == 3
    assert f"{bad}: batch 1 is the first bad one" in result.stdout
    assert "Traceback" not in result.output
    report = json.loads(run(zb, "verify", places[kind], "--json").stdout)
    assert report["ok"] is False
    assert [bool(file["problem"]) for file in report["files"]].count(True) == 1
    assert run(zb, "verify", places[kind], "--quiet").exit_code == 3


def test_verify_finds_every_bad_shard(places):
    store = places["h5-store"]
    for number in (0, 2):
        flip_bit(store / f"shard-0000{number}-of-00003.h5", number)
    result = run(zb, "verify", store)
    assert result.exit_code == 3
    assert result.stdout.count("BAD") == 2
    assert "1 of 3 files" in result.stdout


def test_verify_finds_a_damaged_digest(places):
    path = places["batch-store"] / (FILE_OF_STORE["batch-store"] + ".crc32")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert run(zb, "verify", places["batch-store"]).exit_code == 3


def test_verify_of_a_store_with_swapped_shards(places):
    first, second = (places["h5-store"] / f"shard-0000{number}-of-00003.h5" for number in (0, 1))
    first.rename(first.with_suffix(".x"))
    second.rename(first)
    first.with_suffix(".x").rename(second)
    result = run(zb, "verify", places["h5-store"])
    assert result.exit_code == 3
    assert result.stdout.count("BAD") == 2


@pytest.mark.parametrize("kind", ["h5-store", "batch-store"])
def test_verify_of_a_truncated_shard_exits_4(kind, places):
    path = places[kind] / FILE_OF_STORE[kind]
    os.truncate(path, path.stat().st_size - 4096)
    result = run(zb, "verify", places[kind])
    assert result.exit_code == 4
    assert path.name in result.stdout
    assert "2 of 3 files" in result.stdout


@pytest.mark.parametrize("kind", ["h5-store", "batch-store"])
def test_verify_of_a_missing_shard(kind, places):
    path = places[kind] / FILE_OF_STORE[kind]
    path.unlink()
    result = run(zb, "verify", places[kind])
    assert result.exit_code == 4
    assert path.name in result.stdout
    assert "Traceback" not in result.output


def test_verify_of_an_unfinished_file_exits_4(tmp_path):
    with open_writer(tmp_path / "x.h5", batch_size=4, seq_len=SEQ_LEN) as writer:
        writer.write(batches(5))
        result = run(zb, "verify", tmp_path / "x.h5.partial")
    assert result.exit_code == 4
    assert "5 batches are committed" in result.stdout


# --- in a process of its own -----------------------------------------------------------------------------------


def python(code, *arguments, **options):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)


CONVERT = "from converters.cli import convert; convert()"
ZB = "from zb_hdf5.cli import zb; zb()"
LOADED = """
import sys, atexit
atexit.register(lambda: print(*sorted({"torch", "h5py", "numpy"} & set(sys.modules)), file=sys.stderr))
"""


@pytest.mark.parametrize(("code", "arguments"), [
    (CONVERT, ["--help"]),
    (CONVERT, ["npy-to-hdf5", "--help"]),
    (ZB, ["--help"]),
    (ZB, ["verify", "--help"]),
    (ZB, ["convert", "--help"]),
    ("import zb_hdf5; zb_hdf5.__version__; dir(zb_hdf5)", []),
])  # fmt: skip
def test_help_and_import_load_nothing_large(code, arguments):
    result = python(LOADED + code, *arguments)
    assert result.returncode == 0
    assert result.stderr == "\n"


def test_a_conversion_loads_no_torch(places, tmp_path):
    result = python(LOADED + CONVERT, "npy-to-hdf5", places["npy"], tmp_path / "o.h5", *SHAPE)
    assert result.returncode == 0
    assert "torch" not in result.stderr


@pytest.mark.parametrize("arguments", [("verify",), ("info",), ("info", "--json"), ("--help",)])
def test_output_into_head_ends_quietly(arguments, places):
    path = () if arguments == ("--help",) else (places["h5-store"],)
    command = [sys.executable, "-c", ZB, *arguments, *map(str, path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer,
        subprocess.Popen(["head", "-1"], stdin=writer.stdout, stdout=subprocess.PIPE, text=True) as head,
    ):
        writer.stdout.close()
        assert head.communicate(timeout=100)[0].count("\n") == 1
        errors = writer.stderr.read()
    assert errors == ""


def test_output_into_a_closed_pipe_ends_quietly(places):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = [sys.executable, "-c", ZB, "verify", str(places["h5-store"])]
        result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=100)
    finally:
        os.close(write_end)
    assert result.stderr == ""
    assert result.returncode > 0


@pytest.mark.parametrize("arguments", [("verify",), ("info",)])
def test_a_terminal_without_unicode_gets_a_report_as_well(arguments, places):
    result = python(ZB, *arguments, places["h5-store"], env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.stderr == ""
    assert result.returncode == 0
    assert "12" in result.stdout or "ok" in result.stdout


@pytest.mark.parametrize("script", ["convert", "zb"])
def test_the_console_scripts_are_installed(script):
    path = os.path.join(os.path.dirname(sys.executable), script)
    result = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0
    assert "Usage: " in result.stdout
