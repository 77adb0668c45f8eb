"""`convert` and `zb` as commands: exit codes, streams, help, and what `zb info`, `verify` and `doctor` say."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import click
import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from commandline import commands_of, one_error, run, run_zb
from contents import batches_of, label_batches, write_streams
from damage import flip, flip_token
from packed import write_packed
from processes import python

import zb_hdf5
import zb_hdf5.converters.run
from zb_hdf5 import ChecksumError, FormatError, HDF5ShardWriter, ShardIndex, UnavailableError, open_reader, open_writer
from zb_hdf5.commands.description import describe, describe_lines
from zb_hdf5.commands.findings import HOLES
from zb_hdf5.commands.zb import zb
from zb_hdf5.console import layout_report
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.files.publishing import PartialDirectory
from zb_hdf5.option_groups import GroupedOption
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.shard_table import ShardTable

SEQ_LEN = 8
SHAPE = ("--batch-size", "4", "--seq-len", str(SEQ_LEN))
FILE_OF_STORE = {"h5-store": "shard-00001-of-00003.h5", "batch-store": "shard-00001-of-00003.batch"}


def said(code, *arguments):
    """Return all that a command prints, which ends with this code and without a traceback."""
    result = run(zb, *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def batches(count):
    return np.arange(count * 4 * SEQ_LEN, dtype="<u4").reshape(count, 4, SEQ_LEN)


@pytest.fixture(scope="module")
def made_places(tmp_path_factory):
    """The same 12 batches in everything that holds batches."""
    folder = tmp_path_factory.mktemp("places")
    np.save(folder / "in.npy", batches(12).reshape(-1, SEQ_LEN))
    made = {"npy": folder / "in.npy"}
    for target, suffix in (("hdf5", ".h5"), ("batch", ".batch")):
        made[suffix[1:]] = folder / f"one{suffix}"
        made[f"{suffix[1:]}-store"] = folder / f"store-{target}"
        command = (f"npy-to-{target}", made["npy"])
        assert run(convert, *command, made[suffix[1:]], *SHAPE, "--no-shuffle").exit_code == 0
        store = made[f"{suffix[1:]}-store"]
        assert run(convert, *command, store, *SHAPE, "--no-shuffle", "--shards", 3).exit_code == 0
    return made


@pytest.fixture
def places(made_places, tmp_path):
    """Return copies of `made_places`, which a test may change."""
    shutil.copytree(made_places["npy"].parent, tmp_path, dirs_exist_ok=True)
    return {name: tmp_path / path.name for name, path in made_places.items()}


COMMANDS = dict(commands_of(zb))
LEAVES = sorted(name for name, command in COMMANDS.items() if not isinstance(command, click.Group))


# --- help ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_fits_a_terminal_of_80_columns_and_has_an_example(name, option):
    words = name.split() if name != "zb" else []
    result = CliRunner().invoke(zb, [*words, option], terminal_width=80)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line for line in result.stdout.splitlines() if len(line) > 80] == []
    example = next(line.split("Example:")[1] for line in result.stdout.splitlines() if "Example:" in line)
    assert " ".join(["zb", *words]) in example
    if name not in LEAVES and name != "convert":
        lines = [line.split(maxsplit=1) for line in result.stdout.splitlines() if re.match(r"  \w+  +\w", line)]
        assert sorted(first for first, _ in lines) == COMMANDS[name].list_commands(click.Context(COMMANDS[name]))
        assert not any("..." in line or " " not in line for _, line in lines)  # a summary that is cut off


def test_the_options_of_each_command_stand_by_their_purpose():
    for name in LEAVES:
        shown = run(zb, *name.split(), "--help", code=0).stdout
        headings = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
        of_own = {option.group for option in COMMANDS[name].params if isinstance(option, GroupedOption)}
        assert of_own <= {*headings}
        assert len(headings) == len({*headings}) > bool(of_own)
        assert "--help" in shown.rpartition(":\n")[2]
        assert not re.search(r"\[default[^]]*\]\s+\[default", shown), shown
        ungrouped = [each for each in COMMANDS[name].params if type(each) is click.Option]
        assert len(ungrouped) <= 4, name  # --json and --quiet, and those of a lone heading


def test_every_option_says_what_it_does_without_pointing_at_another_line_and_has_one_note():
    for name, command in COMMANDS.items():
        for parameter in command.params:
            found = getattr(parameter, "help", None)
            assert found or not isinstance(parameter, click.Option), f"{name} {parameter.opts}"
            assert not (found or "").startswith(("The same.", "Of the ", "For ")), f"{name} {parameter.opts}: {found}"
            shown = (parameter.get_help_record(click.Context(command)) or ("", ""))[1]
            assert (shown.count("[default") <= 1, "default: no]" in shown) == (True, False), shown
    assert ".batch" not in str(CliRunner().invoke(convert, ["hdf5-to-hdf5", "--help"]).stdout)


# --- exit codes ------------------------------------------------------------------------------------------------
def test_usage_errors_and_arguments_that_cannot_be_exit_2(tmp_path):
    for arguments in (
        (), ("no-such-command",), ("npy-to-hdf5",), ("npy-to-hdf5", "only-one"),
        ("npy-to-hdf5", "a", "b", "--batch-size", "0"), ("npy-to-hdf5", "a", "b", "--batch-size", "many"),
        ("npy-to-hdf5", "a", "b", "--dtype", "int8"), ("npy-to-hdf5", "a", "b", "--remainder", "keep"),
        ("npy-to-hdf5", "a", "b", "--vocab-size", "0"), ("npy-to-hdf5", "a", "b", "--seed", "-1"),
        ("npy-to-hdf5", "a", "b", "--shards", "0"), ("npy-to-hdf5", "a", "b", "--shard-size", "big"),
        ("npy-to-hdf5", "a", "b", "--no-such-option"), ("hdf5-to-batch", "a", "b", "c"),
        ("batch-to-hdf5", "a", "b", "--dataset", "d"),
    ):  # fmt: skip
        result = run(convert, *arguments)
        assert (result.exit_code, result.stdout, "Usage: " in result.stderr) == (2, "", True), arguments
    np.save(tmp_path / "wide.npy", np.zeros((1, 2**20), "<u2"))
    for options in (("--batch-size", 2**20), ("--batch-size", 1, "--seed", 2**64)):
        command = ("npy-to-hdf5", tmp_path / "wide.npy", tmp_path / "o", "--seq-len", 2**20, *options)
        assert run(convert, *command).exit_code == 2, options


TEXT_COMMANDS = [f"convert {kind}-to-hdf5" for kind in ("parquet", "jsonl", "text")]
READS_A_PATH = ["info", "verify", "repair", "doctor", "index rebuild", *(n for n in LEAVES if n.startswith("convert "))]


#: Stores are read behind URLs as well.
TAKES_URLS = {"info", "verify", "doctor", *(f"convert {name}-to-{other}" for name, other in (
    ("hdf5", "batch"), ("hdf5", "hdf5"), ("hdf5", "npy"), ("batch", "hdf5"), ("batch", "npy")
))}  # fmt: skip
BAD_PATHS = [
    ("nowhere", "nowhere: no such file or folder"),
    ("s3://bucket/x", "s3://bucket/x: is a URL"),
    ("busy.h5", "busy.h5 is not finished"),
]


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [(name, *bad) for name in READS_A_PATH for bad in BAD_PATHS if name not in TAKES_URLS or "://" not in bad[0]],
)
def test_a_path_that_cannot_be_read_exits_2(name, path, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "busy.h5.partial").touch()
    arguments = (path, "out") if name.startswith("convert") else (path,)
    text = ("--tokenizer", "byte") if name in TEXT_COMMANDS else ()
    result = run(zb, *name.split(), *arguments, *text)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["busy.h5.partial"]


@pytest.mark.parametrize("name", [name for name in LEAVES if re.match(r"convert (text|jsonl|stream|\w+-to-npy)", name)])
def test_a_url_is_no_destination(name, places):
    result = run(zb, *name.split(), places["h5"], "s3://bucket/x")
    assert result.exit_code == 2
    assert "download" not in result.stderr
    assert "s3://bucket/x: is a URL" in result.stderr


@pytest.mark.parametrize("command", ["info", "verify"])
@pytest.mark.parametrize("content", [b"", b"hello", b"LLMBATCX" + bytes(5000), None])
def test_an_unknown_file_or_folder_is_an_error(command, content, tmp_path):
    path = tmp_path / "what"
    path.mkdir() if content is None else path.write_bytes(content)
    text = said(1, command, path)  # its first bytes are not what a file of ours has
    assert f"{path}: no {INDEX_NAME if content is None else 'known file'}" in text
    assert text.endswith("; 'zb convert --list' shows what becomes a store\n")
    if content is None:
        (path / "shard-00000-of-00002.h5").touch()
    else:
        path = path.rename(tmp_path / "what.h5")
    assert "BAD: " in said(3, "verify", path)  # of a store, by its name


@pytest.mark.parametrize(("kind", "size"), [("h5", -4096), ("batch", -4096), ("batch", 100)])
@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_truncated_file_exits_4(kind, size, command, places):
    os.truncate(places[kind], size if size > 0 else places[kind].stat().st_size + size)
    assert str(places[kind]) in said(4, command, places[kind])


def test_a_file_that_is_being_written_exits_5(places, tmp_path):
    for suffix, command in ((".h5", "npy-to-hdf5"), (".batch", "npy-to-batch")):
        path = tmp_path / f"busy{suffix}"
        with open_writer(path, batch_size=4, seq_len=SEQ_LEN) as writer:
            writer.write(batches(1))
            assert "another process is writing it" in one_error(run(convert, command, places["npy"], path, *SHAPE), 5)
        with open_reader(path) as reader:
            assert reader.num_batches == 1


@pytest.mark.parametrize(("error", "code", "text"), [
    (KeyboardInterrupt(), 130, "interrupted"),
    (MemoryError("17 PiB"), 1, "17 PiB"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
    (PermissionError(errno.EACCES, "Permission denied", "/precious"), 1, "/precious"),
])  # fmt: skip
def test_an_error_from_underneath_is_one_message(error, code, text, places, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise type(error)(*error.args) if not getattr(error, "filename", None) else OSError(*error.args, error.filename)

    monkeypatch.setattr(zb_hdf5.converters.run, "run", fail)
    assert text in one_error(run(convert, "npy-to-hdf5", places["npy"], tmp_path / "out", *SHAPE), code)


# --- zb info ---------------------------------------------------------------------------------------------------
def info(path, *options, code=0):
    return json.loads(said(code, "info", path, "--json", *options))


@pytest.mark.parametrize("kind", ["h5", "batch"])
def test_info_of_a_file(kind, places, monkeypatch):
    found, backend = info(places[kind]), {"h5": "hdf5", "batch": "batch"}[kind]
    with open_reader(places[kind]) as reader:
        expected = [list(run) for run in reader.corpus.extents.runs]
        assert (found["sha256"], found["fingerprint"]) == (reader.corpus.sha256, reader.fingerprint)
    facts = {"kind": "file", "backend": backend, "state": "complete", "num_batches": 12, "batch_size": 4,
             "seq_len": SEQ_LEN, "dtype": "uint32", "tokens": 384, "total_records": 48,
             "bytes": places[kind].stat().st_blocks * 512}  # fmt: skip
    assert facts.items() <= found.items()
    assert (found["layout"]["extents"], found["layout"]["runs"]) == (expected, 1)
    assert found["layout"]["page_aligned"] is all(base % 4096 == stride % 4096 == 0 for base, stride, _ in expected)
    text = said(0, "info", places[kind])
    for part in (f"{backend} file, complete", "12 of 4 x 8 uint32", "384", "1 run", "48"):
        assert part in text
    for file_system, meaning in (
        (None, "auto (local file system: batches in the page cache are read from a mapping, others by position)"),
        ("nfs", "auto (nfs file system: all tokens are read by position, none are mapped)"),
    ):
        monkeypatch.setattr("zb_hdf5.commands.description.network_file_system", lambda file, found=file_system: found)
        assert meaning in " ".join(said(0, "info", places[kind]).split())


@pytest.mark.parametrize("kind", ["h5-store", "batch-store"])
@pytest.mark.parametrize("by_index", [False, True])
def test_info_of_a_store(kind, by_index, places):
    found = info(places[kind] / INDEX_NAME if by_index else places[kind])
    assert (found["kind"], found["shards"]) == ("store", {"count": 3, "min_batches": 4, "max_batches": 4})
    assert (found["num_batches"], found["tokens"], found["access"]) == (12, 384, "auto")
    assert len(found["sha256"]) == 64
    assert re.search(r"^shards +3 of 4 batches each$", said(0, "info", places[kind]), re.MULTILINE)


def test_info_and_verify_of_a_live_and_of_a_compressed_file(tmp_path, places, gzip_copy):
    with open_writer(tmp_path / "x.h5", batch_size=4, seq_len=SEQ_LEN) as writer:
        writer.write(batches(5))
        found = info(tmp_path / "x.h5.partial")
        assert "growing" in said(0, "info", tmp_path / "x.h5.partial")
        assert "5 batches are committed" in said(4, "verify", tmp_path / "x.h5.partial")
    assert found["state"].startswith("growing")
    assert (found["num_batches"], found["access"], found["layout"], found["sha256"]) == (5, "h5py", None, None)
    path = gzip_copy(places["h5"], tmp_path / "small.h5")
    found = info(path)
    assert (found["access"], found["layout"], found["codec"][:4]) == ("pread", None, "gzip")
    assert found["sha256"] == info(places["h5"])["sha256"]
    assert re.search(r"codec +gzip.*: .* of tokens", said(0, "info", path))
    said(0, "verify", path)


def test_info_and_verify_of_a_foreign_file(tmp_path):
    for name, dtype, code, text in (
        ("i.h5", "i8", 6, "NOT VERIFIED: tokens: a dataset of another origin has no digests; "),
        ("f.h5", "f8", 1, "has no integer dataset"),
    ):
        with h5py.File(tmp_path / name, "w") as h5:
            h5["tokens"] = batches(3).astype(dtype)
            label_batches(h5["tokens"])
        assert text in said(code, "verify", tmp_path / name)
    assert info(tmp_path / "i.h5")["num_batches"] == info(tmp_path / "i.h5", "--dataset", "tokens")["num_batches"] == 3
    with h5py.File(tmp_path / "i.h5", "r+") as h5:
        h5["mask"] = np.ones((3, 4), "u1")
    assert "--dataset" in one_error(run(zb, "info", tmp_path / "i.h5"))
    assert "NOT VERIFIED: no digest is stored: " in said(6, "verify", tmp_path / "i.h5")


@pytest.fixture
def text_store(tmp_path):
    """A store of text with a training and a validation split."""
    for name, count in (("a", 60), ("b", 20)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": "some text " * 5}) + "\n") * count)
    command = ("jsonl-to-hdf5", tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "text")
    options = ("--tokenizer", "byte", "--packing", "best-fit", "--val-last-shard", "--shards", 3, "--remainder", "pad")
    assert run(convert, *command, *options, "--batch-size", 2, "--seq-len", 64).exit_code == 0
    return tmp_path / "text"


def test_info_tells_what_a_store_was_made_of_also_of_a_rebuilt_index(text_store):
    found, index = info(text_store), json.loads((text_store / INDEX_NAME).read_text())
    assert (found["documents"], found["packing"], found["shuffle"]) == (80, "best-fit", "global")
    assert found["tokenizer"] == index["tokenizer"]
    assert found["source"] == index["source"]
    assert {split: part["shards"] for split, part in found["splits"].items()} == {"train": 3, "val": 1}
    with open_reader(text_store, split="val") as reader:
        assert found["splits"]["val"] == {
            "shards": 1, "num_batches": len(reader), "min_batches": len(reader), "max_batches": len(reader),
            "tokens": len(reader) * 128,
        }  # fmt: skip
    text = run(zb, "info", text_store).stdout
    for line in (
        r"documents +80, best-fit packing, their places in the records are stored",
        r"tokenizer +byte, digest [0-9a-f]{16}…",
        r"vocabulary +257 ids, the largest stored is 256",
        r"source +jsonl: .*a\.jsonl and 1 more",
        r"train +3 shards of 10 batches each, 3,840 tokens",
        r"val +1 shard of 10 batches, 1,280 tokens",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), text
    other = {"written": None}  # the time of the index, which is written again
    before = info(text_store) | other
    assert "not recovered" not in said(0, "index", "rebuild", "--force", text_store)
    assert info(text_store) | other == before
    (text_store / INDEX_NAME).unlink()
    assert "not recovered" not in said(0, "index", "rebuild", text_store)
    after = info(text_store) | other
    assert after["source"]["files"]
    assert after["source"].items() <= before["source"].items()
    assert after | {"source": None} == before | {"source": None}


HEALTHY = "complete, not verified now: 'zb verify' compares all of it"


@pytest.mark.parametrize(("kind", "health", "fastest"), [
    ("h5-store", HEALTHY, "whole batches, 4 x 8, in any order; 'zb bench' times them"),
    ("batch", HEALTHY, "whole batches, 4 x 8, in any order; 'zb bench' times them"),
    ("flat", "complete, no digest is stored: 'zb verify' names the way to one",
     "rows of any length, in any order; 'zb bench' times them"),
    ("gzip", HEALTHY, "whole batches, 4 x 8; without a codec none is decoded"),
    ("live", "not finished: its writer is at work, or was killed", "whole batches, 4 x 8, in any order"),
    ("foreign", "complete, no digest is stored", "converted: 'zb convert' makes batches that need no HDF5 lock"),
])  # fmt: skip
def test_info_names_the_health_and_the_fastest_reads_in_one_screen(kind, health, fastest, places, tmp_path, gzip_copy):
    place = places.get(kind, tmp_path / f"{kind}.h5")
    with contextlib.ExitStack() as stack:
        if kind == "flat":
            place = tmp_path / "flat"
            place.mkdir()
            np.save(place / "a.npy", np.arange(99, dtype=np.uint16))
        elif kind == "gzip":
            gzip_copy(places["h5"], place)
        elif kind == "live":
            writer = stack.enter_context(open_writer(place, batch_size=4, seq_len=SEQ_LEN))
            writer.write(batches(5))
            place = tmp_path / "live.h5.partial"
        elif kind == "foreign":
            with h5py.File(place, "w") as h5:
                label_batches(h5.create_dataset("tokens", data=batches(3), compression="lzf"))
        lines = described(place)
    named = dict(lines)
    assert (named["health"].startswith(health), named["fastest"].startswith(fastest)) == (True, True), lines


@pytest.mark.parametrize("kind", ["h5-store", "batch-store"])
def test_info_names_a_shard_that_a_copy_has_cut_short(kind, places, tmp_path):
    store = tmp_path / "copy"
    shutil.copytree(places[kind], store)
    shard = next(path for path in store.glob("shard-00001*") if path.suffix in (".h5", ".batch"))
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    found = f"{shard.name}: expected {size:,} bytes, found {size - 1:,}"
    report = info(store, code=4)
    assert (report["size_problem"], report["state"]) == (found, "damaged")
    assert dict(described(store))["health"].startswith(f"damaged: {found}: 'zb verify' names")
    text = said(4, "info", store)
    assert (text.count("damaged"), "complete" in text) == (1, False)
    assert said(4, "verify", store)
    os.truncate(shard, size + 1)
    assert "damaged: " in said(3, "info", store, "--world-size", 1)


def test_an_epoch_of_a_store_without_a_split_for_training_is_refused_as_a_loader_refuses_it(tmp_path):
    (tmp_path / "ids.jsonl").write_text("".join(f'{{"input_ids": {[number] * 50}}}\n' for number in range(200)))
    how = {"batch_size": 2, "seq_len": 32, "packing": "concat", "val_fraction": 0.3, "workers": 1}
    zb_hdf5.convert(tmp_path / "ids.jsonl", "hdf5", tmp_path / "both", source_format="hf", **how)
    with zb_hdf5.open_corpus(tmp_path / "both", split="val") as corpus:
        zb_hdf5.convert(corpus, "hdf5", tmp_path / "val", workers=1)
    refused = f"{tmp_path / 'val'}: expected a split that this store has (val), found 'train'"
    assert refused in said(2, "info", tmp_path / "val", "--world-size", 2)
    assert refused in said(2, "verify", tmp_path / "val", "--split", "train")
    assert "val" in said(0, "info", tmp_path / "val")


def described(path):
    """Return the lines of `zb info`, which fit a screen of 24 x 80 with the prompt, whatever the path is."""
    lines = describe_lines(describe(path))
    wrapped = list(layout_report([(name, text.replace(str(path), "data/train")) for name, text in lines], 80))
    assert (len(wrapped) <= 22, max(map(len, wrapped)) <= 80) == (True, True), wrapped
    return lines


@pytest.mark.parametrize("layout", ["batches", "stream"])
def test_info_makes_no_entry_for_each_shard(layout, tmp_path, monkeypatch):
    """With 100,000 shards these take ten times as long as the opening of the store, and so does an index read twice."""
    np.save(tmp_path / "t.npy", np.arange(1600, dtype=np.uint32).reshape(-1, 8))
    folder = tmp_path / layout
    if layout == "batches":
        zb_hdf5.convert(tmp_path / "t.npy", "hdf5", folder, batch_size=2, seq_len=8, shards=40)
    else:
        write_streams(folder, [np.arange(40)] * 40)
    made = []
    make = ShardTable.__getitem__
    monkeypatch.setattr(ShardTable, "__getitem__", lambda table, number: made.append(number) or make(table, number))
    found = describe(folder)
    assert len(made) < 10, made
    assert found["splits"]["train"]["shards"] == 40


def test_info_of_a_store_that_has_everything_fits_one_screen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packed = write_packed(tmp_path / "p.h5", [10, 0, 30])
    described(packed.path)
    said(0, "convert", "hdf5-to-hdf5", "p.h5", "all", "--note", "a licence", "--codec", "gzip")
    d = describe("all")
    d |= {"tokenizer": {"name": "hf/of-a-model", "digest": "a" * 64}, "vocab_size": 50_257, "max_token": 50_256}
    d["splits"] = {f"split-{number}": {**d["splits"]["train"]} for number in range(9)}
    wrapped = list(layout_report(describe_lines(d), 80))
    assert any("and 6 more splits, which --json lists" in line for line in wrapped)
    assert len(wrapped) <= 23, wrapped


def test_info_of_a_tokenizer_and_of_a_source_in_other_words(places):
    for text, expected in (("my own", {"name": "my own"}), ("[1]", {"name": "[1]"}), ("", None)):
        with h5py.File(places["h5"], "r+") as h5:
            h5.attrs["tokenizer"] = text
        assert info(places["h5"])["tokenizer"] == expected
        said(0, "info", places["h5"])
    store = places["h5-store"]
    for source in ({}, {"files": "one"}, {"path": "p"}, {"files": []}):
        replace(ShardIndex.load(store), source=source).save(store)
        assert info(store)["source"] == source
        said(0, "info", store)


def test_info_of_a_stream_and_of_documents_and_fields(tmp_path, text_store):
    (tmp_path / "in.jsonl").write_text((json.dumps({"text": "some text"}) + "\n") * 5000)
    command = ("jsonl-to-hdf5", tmp_path / "in.jsonl", tmp_path / "s", "--tokenizer", "byte", "--layout", "stream")
    assert run(convert, *command).exit_code == 0
    found = info(tmp_path / "s")
    assert found["splits"] == {"train": {"shards": 1, "tokens": 50_000, "documents": 5000}}
    assert (found["tokenizer"]["name"], found["source"]["format"]) == ("byte", "jsonl")
    assert "hdf5 token stream in 1 file\n" in run(zb, "info", tmp_path / "s").stdout
    verified = run(zb, "verify", tmp_path / "s").stdout
    assert "verified: 50 k tokens (crc32, sha256, documents, index)" in verified
    assert "batch" not in verified
    packed = write_packed(tmp_path / "p.h5", [10, 0, 30])
    found = info(packed.path)
    assert found["pieces"] is True
    tables = {"count": 1, "documents": 3, "ids": True, "metadata": ["n"], "sources": 2, "spans": "json"}
    assert found["document_tables"] == tables
    assert found["fields"]["vector"] == {"dtype": "<f4", "shape": [2]}
    lines = run(zb, "info", packed.path).stdout
    for line in (
        r"documents +3, their places in the records are stored",
        r"document facts +ids, metadata \(n\), 2 sources, spans \(json\), in 1 table",
        r"fields +both \['x', 'y'\], mark bytes8, mask uint8, vector float32\[2\]",
    ):
        assert re.search(f"^{line}$", lines, re.MULTILINE), lines
    tables = {"count": 2, "documents": 80, "ids": False, "metadata": [], "sources": 2, "spans": None}
    assert info(text_store)["document_tables"] == tables
    (text_store / "documents-00000.tables").unlink()
    found = info(text_store, code=4)
    assert found["state"] == "damaged"
    assert "documents-00000.tables: is not there" in found["document_tables"]["problem"]
    assert (found["documents"], found["pieces"]) == (80, True)
    assert "documents-00000.tables: is not there" in said(4, "info", text_store)
    with HDF5ShardWriter(tmp_path / "s.h5", fields={"mask": "u1"}) as writer:
        writer.write_document([1, 2], {"mask": [0, 1]}, spans=[(0, 1, "a")], id=7)
    found = info(tmp_path / "s.h5")
    assert (found["document_tables"]["ids"], found["document_tables"]["spans"]) == (True, "json")
    assert found["fields"] == {"mask": {"dtype": "|u1", "shape": []}}


def test_info_of_an_interrupted_conversion(places, tmp_path):
    partial = tmp_path / "out.partial"
    said(0, "convert", "hdf5-to-batch", places["h5-store"], tmp_path / "out", "--shard-range", "0/2")
    found = info(partial)
    assert (found["kind"], found["finished"], found["total"]) == ("unfinished conversion", 1, 3)
    assert found["at_work"] is False
    next_step = f"go on with the same command and --resume for each part, then with 'zb index merge {tmp_path / 'out'}'"
    assert f"1 of 3 shards are finished; {next_step}" in said(0, "info", partial)
    assert "its conversion is not finished" in said(4, "verify", partial)
    assert f"zb info {partial}" in run(zb, "info", tmp_path / "out").stderr
    with PartialDirectory(tmp_path / "out"):  # as a conversion holds it
        assert info(partial)["at_work"] is True


# --- dry runs --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["t9.hdf5", "t9.npz", "t9.batch", "no/folder/t9", "in.npy", "store-hdf5"])
def test_a_dry_run_refuses_what_the_run_refuses(name, places, tmp_path):
    command = ("npy-to-hdf5", places["npy"], tmp_path / name, *SHAPE)
    refusal = one_error(run(convert, *command, "--quiet"))  # which silences no error
    assert one_error(run(convert, *command, "--dry-run")) == refusal
    if name == "store-hdf5":
        assert "exists already; pass --force" in refusal
        assert run(convert, *command, "--dry-run", "--force").exit_code == 0


def test_the_json_of_a_conversion_and_the_shape_and_dtype_of_a_dry_run(places, tmp_path):
    command = ("npy-to-hdf5", places["npy"], tmp_path / "out", *SHAPE, "--vocab-size", 400, "--dry-run")
    assert re.search(r"^batches +12 of 4 x 8 uint16$", run(convert, *command).stdout, re.MULTILINE)
    planned = json.loads(run(convert, *command, "--json").stdout)
    assert (planned["batch_size"], planned["seq_len"], planned["dtype"]) == (4, 8, "uint16")
    result = run(convert, "npy-to-hdf5", places["npy"], tmp_path / "out", *SHAPE, "--shards", 3, "--json")
    report = json.loads(result.stdout)
    assert report.pop("version") == 1
    seconds, rate = report.pop("seconds"), report.pop("tokens_per_second")
    assert seconds >= 0
    assert rate > 0
    with open_reader(tmp_path / "out") as reader:
        digest = reader.corpus.sha256
    assert report == {
        "path": str(tmp_path / "out"), "batch_size": 4, "seq_len": SEQ_LEN, "dtype": "uint32", "num_batches": 12,
        "num_shards": 3, "shards_kept": 0, "shards_written": 3, "left_behind": "",
        "tokens_in": 384, "tokens_stored": 384,
        "tokens_written": 384, "tokens_padded": 0, "tokens_dropped": {},
        "max_token": 383, "shuffle": "direct: 100% of a sample of the source are in the page cache", "sha256": digest,
        "padding_rows": 0, "extension": None, "uint16_would_save_bytes": 768,
    }  # fmt: skip


# --- zb verify -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "checks"), [
    ("h5", ["crc32", "sha256"]),
    ("h5-store", ["crc32", "sha256", "index"]),
    ("batch-store", ["crc32", "index"]),
])  # fmt: skip
def test_verify_says_what_it_compared(kind, checks, places):
    report, count = json.loads(said(0, "verify", places[kind], "--json")), 3 if "store" in kind else 1
    assert report["ok"] is True
    assert sum(file["num_batches"] for file in report["files"]) == 12
    found = [(file["checks"], file["problem"], file["missing"], file["outcome"]) for file in report["files"]]
    assert found == [(checks, None, "", "verified")] * count
    verdict = "3 of 3 files are as they were written" if count == 3 else "the file is as it was written"
    assert f"verified: {verdict}" in said(0, "verify", places[kind])


@pytest.mark.parametrize(("kind", "missing"), [("batch", "zb index crc32"), ("npy", "hold no digests")])
def test_files_without_digests_could_not_be_verified(kind, missing, places):
    places[kind].with_name("one.batch.crc32").unlink(missing_ok=True)
    text = said(6, "verify", places[kind])
    assert "NOT VERIFIED: there is nothing to compare the file with" in text
    assert "as it was written" not in text
    report = json.loads(said(6, "verify", places[kind], "--json"))
    assert (report["ok"], report["outcome"]) == (False, "unverified")
    assert [(file["outcome"], file["checks"]) for file in report["files"]] == [("unverified", [])]
    assert missing in report["files"][0]["missing"]
    assert said(6, "verify", places[kind], "--quiet") == ""


def test_info_of_arrays_names_the_next_step_and_one_without_digests_is_not_a_verified_folder(tmp_path):
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / name, np.arange(9))
    os.truncate(tmp_path / "a.npy", 100)
    text = said(4, "verify", tmp_path)  # what is bad counts more
    assert "BAD: 0 of 2 files are as they were written, 1 could not be compared with anything, 1 not" in text
    np.save(tmp_path / "a.npy", np.zeros((3, 511), np.uint16, order="F"))
    for path in (tmp_path, tmp_path / "a.npy"):
        assert "found Fortran order: zb convert" in one_error(run(zb, "info", path))


@pytest.mark.parametrize("kind", ["h5", "h5-store", "batch-store"])
def test_damaged_metadata_exits_3(kind, places):
    path = places[kind] / INDEX_NAME if "store" in kind else places[kind]
    flip(path, path.read_bytes().index(b"zb-batches" if kind == "h5" else b"zb-shards"))
    assert "BAD" in said(3, "verify", places[kind])
    assert json.loads(said(3, "verify", places[kind], "--json"))["outcome"] == "bad"


@pytest.mark.parametrize("how", ["compressed", "moved", "userblock"])
def test_a_repacked_shard_names_its_cause_and_cure(how, places, gzip_copy):
    store, shard = places["h5-store"], places["h5-store"] / FILE_OF_STORE["h5-store"]
    if how == "userblock":
        with h5py.File(shard) as old, h5py.File(store / "new", "w", userblock_size=512) as new:
            new.attrs.update(old.attrs)
            for name in ("batches", "crc32"):
                old.copy(name, new)
    else:
        gzip_copy(shard, store / "new", compression="gzip" if how == "compressed" else None)
    os.replace(store / "new", shard)
    text = said(3, "verify", store)
    assert text.count("BAD: ") == 2  # the shard, and the verdict
    assert f"{shard}: expected its batches at the offsets that {INDEX_NAME} has" in text
    assert f"run 'zb index rebuild --force {store}'" in text
    with (
        open_reader(store) as reader,
        pytest.raises(FormatError, match=r"offsets .* repacked .* rebuild the index"),
    ):
        reader.read_batch(4)
    with open_reader(store, access="h5py") as reader:  # which asks the file itself
        np.testing.assert_array_equal(reader.read_batch(4), batches(12)[4])
    said(0, "index", "rebuild", "--force", store)
    said(0, "verify", store)
    np.testing.assert_array_equal(batches_of(store), batches(12))


def test_a_swapped_batch_shard_is_not_read_and_a_crc32_file_makes_a_lone_batch_verifiable(places):
    store = places["batch-store"]
    first, second = (store / f"shard-0000{number}-of-00003.batch" for number in (0, 1))
    for suffix in ("", ".crc32"):
        one, other = Path(f"{first}{suffix}"), Path(f"{second}{suffix}")
        one.rename(store / "aside")
        other.rename(one)
        (store / "aside").rename(other)
    for verify in ("none", "batch"):
        with pytest.raises(ChecksumError, match="belongs elsewhere; verify it"), open_reader(store, verify=verify) as r:
            r.read_batch(0)
    assert run(zb, "verify", store).exit_code == 3
    places["batch"].with_name("one.batch.crc32").unlink()
    assert "wrote one.batch.crc32" in said(0, "index", "crc32", places["batch"])
    said(0, "verify", places["batch"])
    assert "already" in said(0, "index", "crc32", places["batch"])
    flip_token(places["batch"], 3)
    said(3, "verify", places["batch"])
    assert "expected a .batch file, found a 'hdf5' file" in one_error(run(zb, "index", "crc32", places["h5"]))


@pytest.mark.parametrize("kind", ["h5", "h5-store", "batch-store"])
@pytest.mark.parametrize("workers", [(), ("--workers", 1)])
def test_verify_names_the_first_bad_batch(kind, workers, places):
    bad = places[kind] / FILE_OF_STORE[kind] if "store" in kind else places[kind]
    for number in (3, 1):
        flip_token(bad, number)
    assert f"{bad}: batch 1 is the first bad one" in said(3, "verify", places[kind], *workers)
    report = json.loads(said(3, "verify", places[kind], "--json"))
    assert report["ok"] is False
    assert [bool(file["problem"]) for file in report["files"]].count(True) == 1
    assert said(3, "verify", places[kind], "--quiet") == ""
    with pytest.raises(ChecksumError, match="batch 1 is the first bad one"):
        open_reader(places[kind], verify="store")


def flip_two(store):
    for number in (0, 2):
        flip_token(store / f"shard-0000{number}-of-00003.h5", number)


def swap_two(store):
    first, second = (store / f"shard-0000{number}-of-00003.h5" for number in (0, 1))
    first.rename(first.with_suffix(".x"))
    second.rename(first)
    first.with_suffix(".x").rename(second)


def spoil_digest(store):
    flip(store / f"{FILE_OF_STORE['batch-store']}.crc32", -1, 0xFF)


@pytest.mark.parametrize(
    ("kind", "damage", "good"), [("h5-store", flip_two, 1), ("h5-store", swap_two, 1), ("batch-store", spoil_digest, 2)]
)
def test_verify_finds_every_bad_shard(kind, damage, good, places):
    damage(places[kind])
    text = said(3, "verify", places[kind])
    assert text.count("BAD: ") == 4 - good  # the shards, and the verdict
    assert f"{good} of 3 files" in text


@pytest.mark.parametrize("kind", ["h5-store", "batch-store"])
@pytest.mark.parametrize("size", [0, 6, 100, 4096, 8192, -4096, None])  # None: it is gone
def test_verify_of_a_truncated_or_missing_shard_exits_4(kind, size, places):
    path = places[kind] / FILE_OF_STORE[kind]
    path.unlink() if size is None else os.truncate(path, size % path.stat().st_size)
    text = said(3 if size in (0, 6) else 4, "verify", places[kind])
    assert path.name in text
    assert ("is not there; restore it" in text) == (size is None)
    assert "2 of 3 files" in text


# --- in a process of its own -----------------------------------------------------------------------------------
CONVERT = "from zb_hdf5.converters.cli import convert_commands; convert_commands()"
ZB = "from zb_hdf5.commands.zb import zb; zb()"
LOADED = """
import sys, atexit
atexit.register(lambda: print(*sorted({"torch", "h5py", "numpy"} & set(sys.modules)), file=sys.stderr))
"""


def test_help_and_import_load_nothing_large_and_a_conversion_no_torch(places, tmp_path):
    for code, *arguments in (
        (CONVERT, "--help"), (CONVERT, "npy-to-hdf5", "--help"), (ZB, "--help"), (ZB, "verify", "--help"),
        (ZB, "convert", "--help"), ("import zb_hdf5; zb_hdf5.__version__; dir(zb_hdf5)",),
    ):  # fmt: skip
        result = python(LOADED + code, *arguments)
        assert (result.returncode, result.stderr) == (0, "\n"), arguments
    result = python(LOADED + CONVERT, "npy-to-hdf5", places["npy"], tmp_path / "o.h5", *SHAPE)
    assert (result.returncode, "torch" in result.stderr) == (0, False)


@pytest.mark.parametrize("arguments", [("verify",), ("info",), ("info", "--json"), ("--help",)])
@pytest.mark.thin
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


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("info", "h5-store"), 0), (("--help",), 0), (("info", "--help"), 0), (("verify", "cut"), 4), (("info", ""), 2)],
)
@pytest.mark.thin
def test_a_reader_that_ends_first_changes_no_exit_code(arguments, code, places, tmp_path):
    """As in `zb info x | head -1` of a script with `set -o pipefail`."""
    if "cut" in arguments:
        shutil.copy(places["h5"], tmp_path / "cut.h5")
        os.truncate(tmp_path / "cut.h5", 4096)
    paths = {"h5-store": places["h5-store"], "cut": tmp_path / "cut.h5", "": tmp_path / "nothing"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = [sys.executable, "-m", "zb_hdf5", *(str(paths.get(word, word)) for word in arguments)]
        result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=100)
    finally:
        os.close(write_end)
    assert (result.returncode, bool(result.stderr)) == (code, code == 2), result.stderr


def test_output_into_a_closed_pipe_or_a_terminal_without_unicode_ends_quietly(places):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = [sys.executable, "-c", ZB, "verify", str(places["h5-store"])]
        result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=100)
    finally:
        os.close(write_end)
    assert result.stderr == ""
    assert result.returncode > 0
    for command, word in (("verify", "verified"), ("info", "12")):
        result = python(ZB, command, places["h5-store"], env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert (result.returncode, result.stderr, word in result.stdout) == (0, "", True)


def test_the_console_scripts_are_installed():
    for script in ("convert", "zb"):
        path = os.path.join(os.path.dirname(sys.executable), script)
        result = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=100)
        assert (result.returncode, "Usage: " in result.stdout) == (0, True)


# --- zb doctor -------------------------------------------------------------------------------------------------
def doctor(path, code=0):
    return {finding["name"]: finding for finding in json.loads(said(code, "doctor", path, "--json"))["findings"]}


def test_a_store_whose_first_shard_grows_is_looked_at(tmp_path, tokens):
    options = {"batch_size": 3, "seq_len": 10, "dtype": "uint32", "live": True, "shard_batches": 9}
    with open_writer(tmp_path / "s", **options) as writer:
        writer.write(tokens)
        assert "problem" not in {finding["state"] for finding in doctor(tmp_path / "s").values()}
        writer.finish()
    assert "of 1 shards" in doctor(tmp_path / "s")["open files"]["text"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, 524, errno.EIO])
def test_missing_locks_are_noted(number, tmp_path, tokens, write_file, monkeypatch):
    path = write_file(tmp_path / "x.batch", tokens).path

    def refuse(*_):
        raise OSError(number, "x")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert doctor(path)["locks"]["state"] == "note"
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    assert doctor(path, 5)["locks"]["state"] == "problem"


@pytest.mark.parametrize(
    ("hdf5", "plugin", "holes", "state"),
    [
        ("1.14.6", "7.0.0", 38, "ok"),
        ("2.0.0", "7.0.0", 13, "ok"),
        ("2.2.0", "7.0.0", 4, "note"),
        ("2.2.0", "7.1.0", 4, "ok"),
        ("2.3.0", "10.0", 2, "ok"),
        ("2.4.0", None, 0, None),
    ],
)
def test_versions_with_holes_and_bugs_are_named(hdf5, plugin, holes, state, tmp_path, tokens, write_file, monkeypatch):
    def version(package):
        if plugin is None:
            raise PackageNotFoundError(package)
        return plugin

    monkeypatch.setattr(h5py.version, "hdf5_version", hdf5)
    monkeypatch.setattr(h5py.version, "hdf5_version_tuple", tuple(map(int, hdf5.split("."))))
    monkeypatch.setattr("zb_hdf5.commands.findings.version", version)
    found = doctor(write_file(tmp_path / "x.batch", tokens).path)
    text = f"SECURITY.md lists {holes or 'no'} holes that HDF5 {hdf5} does not mend"
    assert (found["security holes"]["state"], found["security holes"]["text"]) == ("note" if holes else "ok", text)
    package = found.get("filter package", {"state": None, "text": ""})
    assert package["state"] == state
    assert ("chunks that its Blosc2 filter writes are lost" in package["text"]) == (state == "note")


def test_the_holes_that_are_counted_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| up to ([\d.]+) \|(.*)\|$", page, re.M)
    counted = {tuple(map(int, last.split("."))): len(set(re.findall(r"CVE-\d{4}-\d+", row))) for last, row in rows}
    assert counted == HOLES


def test_a_missing_filter_is_a_problem(tmp_path, tokens, write_file, gzip_copy, monkeypatch):
    path = gzip_copy(write_file(tmp_path / "x.h5", tokens).path, tmp_path / "z.h5")
    assert doctor(path)["layout"]["state"] == "ok"

    def refuse(reader, index):
        raise UnavailableError("a filter is missing")

    monkeypatch.setattr("zb_hdf5.formats.batches.Batches.read_batch", refuse)
    assert doctor(path, 5)["filters"]["state"] == "problem"


@pytest.mark.parametrize("group", [("convert",), ("cache",), ("index",), ("tokenizer",)])
def test_a_group_without_a_command_shows_its_help(group):
    result = run_zb(*group)
    assert (result.exit_code, result.output) == (2, run_zb(*group, "--help").output)
