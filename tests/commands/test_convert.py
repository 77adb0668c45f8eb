"""`zb convert SRC... DST`: the formats follow from the names, and it is the command of each pair too."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import h5py
import numpy as np
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from commandline import one_error, report_of, run, run_zb, succeed
from contents import batches_of

from zb_hdf5 import ArgumentError, convert, open_corpus
from zb_hdf5.__main__ import convert as script
from zb_hdf5.commands.zb import zb
from zb_hdf5.console import flag_of
from zb_hdf5.converters.cli import PAIRS, convert_any, convert_commands
from zb_hdf5.converters.command_options import GROUP_HEADINGS
from zb_hdf5.converters.conversion import OPTION_GROUPS, OPTIONS
from zb_hdf5.converters.sources import sources, target_names

ROOT = Path(__file__).parents[2]
TRAINERS = ROOT / "tests" / "data" / "trainers"
TOKENS = np.random.default_rng(5).integers(0, 9, 20 * 64).astype(np.uint16)
TEXT = ("--tokenizer", "byte", "--seq-len", 16, "--batch-size", 2)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return one source of each format, by its name."""
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("npy", "parquet", "text"):
        (folder / name).mkdir()
    np.save(folder / "npy" / "a.npy", TOKENS)
    texts = ["once upon a time"] * 8
    parquet.write_table(table({"text": texts}), folder / "parquet" / "a.parquet")
    (folder / "text" / "a.txt").write_text(" ".join(texts))
    (folder / "jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "jsonl").rename(folder / "in.jsonl")
    for target in ("hdf5", "batch"):
        convert(folder / "npy", target, folder / target, batch_size=4, seq_len=16)
    convert(folder / "npy", "stream", folder / "stream", boundary_token_id=3)
    named = {name: folder / name for name in ("npy", "hdf5", "batch", "stream", "parquet", "text")}
    return {**named, "jsonl": folder / "in.jsonl"}


def options_of(pair):
    source, _, target = pair.partition("-to-")
    if source in ("parquet", "jsonl", "text"):
        return TEXT
    if target == "stream":
        return ("--boundary-token-id", 3)
    return ("--seq-len", 16, "--batch-size", 4) if source in ("npy", "stream") else ()


def files_of(path):
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in [path, *path.rglob("*")] if each.is_file()}


# --- the same conversion -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.thin
def test_the_one_command_writes_the_bytes_of_each_pair(pair, inputs, tmp_path):
    source, _, target = pair.partition("-to-")
    name = "out.npy" if target == "npy" else "out"
    only = ("--tokens-only",) if (source, target) == ("stream", "batch") else ()
    how = (*options_of(pair), *only, "--quiet")
    for folder in ("pair", "one", "named"):
        (tmp_path / folder).mkdir()
    succeed(zb, "convert", pair, inputs[source], tmp_path / "pair" / name, *how)
    to = ("--to", target) if target in ("batch", "stream") else ()
    succeed(zb, "convert", *how, *to, inputs[source], tmp_path / "one" / name)
    succeed(zb, "convert", "--from", source, "--to", target, inputs[source], tmp_path / "named" / name, *how)
    expected = files_of(tmp_path / "pair")
    assert len(expected) >= 1
    for folder in ("one", "named"):
        assert files_of(tmp_path / folder) == expected


def test_the_pairs_are_those_of_the_seeds_and_no_format_that_is_added_has_one():
    assert [*convert_commands.commands] == list(PAIRS)
    assert {"npy-to-hdf5", "hdf5-to-batch"} <= {*PAIRS}
    assert len(PAIRS) == 13


@pytest.mark.parametrize(("name", "files"), [
    ("one.h5", ["one.h5"]), ("one.batch", ["one.batch", "one.batch.crc32"]), ("one.npy", ["one.npy"]),
    ("folder", ["folder"]), ("run-1.5", ["run-1.5"]),
])  # fmt: skip
def test_the_target_is_that_of_the_suffix_and_hdf5_for_a_folder(name, files, inputs, tmp_path):
    succeed(zb, "convert", inputs["hdf5"], tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    if "." not in name or name == "run-1.5":
        assert {path.suffix for path in (tmp_path / name).iterdir()} == {".h5", ".json"}
    report = convert(inputs["hdf5"], "auto", tmp_path / f"again-{name}")
    assert report.tokens_stored == TOKENS.size


def test_a_suffix_that_is_not_written_is_refused_as_by_the_pair(inputs, tmp_path):
    for name in ("out.hdf5", "out.npz"):
        message = one_error(run_zb("convert", inputs["hdf5"], tmp_path / name))
        assert "expected a folder or a name that ends in" in message
    assert list(tmp_path.iterdir()) == []


def test_the_line_for_a_name_that_is_not_written_fits_the_same_store(inputs, tmp_path):
    np.save(tmp_path / "a.npy", TOKENS)
    message = one_error(run_zb("convert", tmp_path / "a.npy", tmp_path / "out.zarr", "--like", inputs["hdf5"]))
    succeed(zb, *shlex.split(message.partition(": zb ")[2]))
    assert (tmp_path / "out" / "shards.json").exists()


def test_several_sources_come_first_and_the_last_word_is_the_result(inputs, tmp_path):
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", TOKENS)
    succeed(zb, "convert", tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "out", "--seq-len", 16, "--no-shuffle")
    stored = np.concatenate(batches_of(tmp_path / "out")).reshape(-1)
    np.testing.assert_array_equal(stored, np.concatenate([TOKENS, TOKENS])[: stored.size])
    message = one_error(run_zb("convert", inputs["hdf5"], inputs["hdf5"], tmp_path / "no"))
    assert "expected one" in message


# --- the words ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("words", "message"), [
    ("npy-to-hdf tokens out", "No such command 'npy-to-hdf'. (Did you mean one of: "),
    ("npy-to-hdf", "No such command 'npy-to-hdf'."),
    ("--batch-size 4 npy-to-hdf tokens out", "No such command 'npy-to-hdf'."),
    ("nowhere npy-to-hdf out", "No such command 'npy-to-hdf'."),
    ("--quiet npy-to-hdf5 tokens out", "'npy-to-hdf5' must be the first word: "),
    ("tokens npy-to-hdf5 out", "npy-to-hdf5: no such file or folder"),
    ("--note my-to-do nowhere out", "nowhere: no such file or folder"),
    ("nowhere web-to-train", "nowhere: no such file or folder"),
    ("nowhere out", "nowhere: no such file or folder"),
    ("tokens", "Missing argument 'SRC...'. Pass the sources, then DST."),
    ("--to npy", "Missing argument 'SRC...'. Pass the sources, then DST."),
    ("--from nyp tokens out", "'nyp' is not a format: expected one of batch, hdf5, "),
    ("--to text tokens out", "'text' is not a format: expected one of batch, hdf5, npy, stream"),
    ("tokens out --no-such-option", "No such option '--no-such-option'."),
    ("tokens out --batch-size many", "'many' is not a valid integer"),
])  # fmt: skip
def test_a_wrong_word_is_wrong_usage_and_names_the_right_one(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokens").mkdir()
    result = run_zb("convert", *words.split(), code=2)
    assert (result.stdout, message in result.stderr) == ("", True), result.stderr
    assert result.stderr.startswith("Usage: zb convert [OPTIONS] ")
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_source_that_is_named_like_a_pair_is_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("one-to-many.npy", TOKENS)
    Path("web-to-train").mkdir()
    np.save("web-to-train/a.npy", TOKENS)
    succeed(zb, "convert", "web-to-train", "out-to-in", "--seq-len", 16)
    succeed(zb, "convert", "one-to-many.npy", "out", "--seq-len", 16)
    assert files_of(Path("out-to-in")).keys() == files_of(Path("out")).keys()


@pytest.mark.parametrize(("words", "hint"), [
    ("photo.png photo.jpg", True), ("-resize 50% a.png b.png", True), ("rose: out.GIF", True), ("in.tiff[0] out", True),
    ("nowhere out", False), ("tokens out --batch-size many", False), ("tokens -q out", False),
])  # fmt: skip
def test_the_script_names_the_program_of_imagemagick_where_its_words_are_meant_for_that(
    words, hint, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    for name in ("photo.png", "a.png"):
        Path(name).write_bytes(b"\x89PNG\r\n\x1a\n and so on")
    for folder in ("ours", "theirs"):
        Path(folder).mkdir()
        Path(folder, "convert").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'ours'}:{tmp_path / 'nowhere'}:{tmp_path / 'theirs'}")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "ours" / "convert")])
    named = f"ImageMagick's program of this name is {tmp_path / 'theirs' / 'convert'}"
    done = CliRunner().invoke(convert_commands, words.split(), prog_name="convert")
    assert (done.exit_code > 0, named in done.stderr) == (True, hint), done.stderr
    assert named not in run_zb("convert", *words.split()).stderr


def test_the_script_convert_is_the_same(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["convert", str(inputs["hdf5"]), str(tmp_path / "out"), "--quiet"])
    monkeypatch.setattr("zb_hdf5.__main__.handle_signals", lambda: None)
    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 0
    assert (tmp_path / "out" / "shards.json").exists()
    result = run(convert_commands, "a", "b", "--no-such", code=2)
    assert result.stderr.startswith("Usage: convert [OPTIONS] SRC... DST\nTry 'convert --help' for help.")


# --- options -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("source", "options", "message"), [
    ("npy", ["--tokenizer", "byte"], "--tokenizer belongs to parquet, jsonl, text, found .npy files of tokens; "
     "leave it out; the options are --batch-size, --codec, "),
    ("hdf5", ["--seed", "1", "--pad-id", "2"], "--pad-id, --seed belong to npy, "),
    ("hdf5", ["--to", "npy", "--codec", "zstd"], "--codec does not apply to an HDF5 store as npy; "
     "leave it out; the options are "),
    ("npy", ["--layout", "stream"], "found 1-D .npy files; leave it out: "
     "--to stream writes a token stream; the options are "),
    ("jsonl", ["--tokenizer", "byte", "--shard-range", "0/2"], "--shard-range "),
    ("hdf5", ["--tokens-only"], "--tokens-only does not apply to an HDF5 store as hdf5; leave it out; "),
    ("hdf5", ["--layout", "stream"], "found an HDF5 store; leave it out; the options are "),
])  # fmt: skip
def test_an_option_that_does_not_apply_is_refused_with_those_that_do(source, options, message, inputs, tmp_path):
    result = run_zb("convert", inputs[source], tmp_path / "out", *options)
    assert message in one_error(result, 2)
    assert list(tmp_path.iterdir()) == []


def test_an_option_of_streams_names_them_and_leaving_it_out_is_the_cure(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(64, dtype=np.uint16).reshape(-1, 2))
    done = run_zb("convert", tmp_path / "rows.npy", tmp_path / "out", "--to", "olmo", "--boundary-token-id", 5)
    assert one_error(done, 2).startswith(
        f"{tmp_path}/rows.npy: --boundary-token-id belongs to 1-D .npy files, token streams of documents, found 2-D "
        ".npy files of records; leave it out; the options are --"
    )
    run_zb("convert", tmp_path / "rows.npy", tmp_path / "out", "--to", "olmo", code=0)
    assert np.fromfile(next((tmp_path / "out").glob("*.npy")), np.uint16).tolist() == [*range(64)]
    done = run_zb("convert", tmp_path / "rows.npy", tmp_path / "store", "--layout", "stream")
    assert "found 2-D .npy files of records; leave it out; the options are --" in one_error(done, 2)
    run_zb("convert", tmp_path / "rows.npy", tmp_path / "store", code=0)
    message = one_error(run_zb("convert", tmp_path / "rows.npy", tmp_path / "again", "--to", "stream"), 1)
    assert message.endswith("found rows of 2; npy-to-hdf5 takes records")  # which has no axes to pass
    run_zb("convert", "npy-to-hdf5", tmp_path / "rows.npy", tmp_path / "again", code=0)


def test_a_layout_of_files_of_documents_names_the_target_that_writes_it(tmp_path):
    with h5py.File(tmp_path / "ragged.h5", "w") as h5:
        rows = h5.create_dataset("tokens", (3,), h5py.vlen_dtype(np.uint16))
        for number in range(3):
            rows[number] = np.arange(number + 2, dtype=np.uint16)
    done = run_zb("convert", tmp_path / "ragged.h5", tmp_path / "out", "--layout", "stream")
    message = one_error(done, 2)
    assert "found HDF5 files of documents; leave it out: --to stream writes a token stream; the options" in message
    assert "nearest" not in message
    run_zb("convert", tmp_path / "ragged.h5", tmp_path / "out", "--to", "stream", code=0)
    with open_corpus(tmp_path / "out") as corpus:
        assert [each.ids.tolist() for each in corpus.documents] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_name_of_no_format_is_refused_from_python_too(inputs, tmp_path):
    with pytest.raises(ArgumentError, match="source_format must be one of auto, batch, "):
        convert(inputs["npy"], "hdf5", tmp_path / "out", source_format="nyp")
    with pytest.raises(ArgumentError, match="target must be one of auto, batch, "):
        convert(inputs["npy"], "zip", tmp_path / "out")


def test_the_command_takes_every_option_of_a_conversion_in_its_group():
    options = [each for each in convert_any.params if isinstance(each, click.Option)]
    groups = {each.name: each.group for each in options if each.name in OPTIONS}
    assert groups == {name: GROUP_HEADINGS[option.group] for name, option in OPTIONS.items()}
    text = CliRunner().invoke(zb, ["convert", "--help"], terminal_width=80).stdout
    headings = re.findall(r"^(\w+) \(.*\):$", text, re.MULTILINE)
    assert [heading.lower() for heading in headings] == list(OPTION_GROUPS)
    for group, part in zip(OPTION_GROUPS, re.split(r"^\w+ \(.*\):$", text, flags=re.MULTILINE)[1:], strict=True):
        flags = set(re.findall(r"^  (--[\w-]+)", part, re.MULTILINE))
        expected = {flag_of(name) for name, option in OPTIONS.items() if option.group == group}
        assert expected <= flags
    others = {flag for each in options for flag in each.opts} - {flag_of(name) for name in OPTIONS}
    assert others == {"--from", "--to", "--dry-run", "--list", "--no-shuffle", "--json", "--quiet", "-q"}


def test_the_help_of_two_formats_has_their_options_with_their_defaults():
    text = " ".join(succeed(zb, "convert", "--from", "npy", "--to", "batch", "--help").stdout.split())
    assert "Records per batch. [default: 32]" in text
    assert not re.search("--tokenizer|--codec|--dataset", text)
    text = " ".join(succeed(zb, "convert", "--help").stdout.split())
    assert re.search(r"Records per batch\. +\[x>=1\]", text)  # no default is that of all
    assert all(pair in text for pair in PAIRS)


def test_the_example_of_the_help_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokens").mkdir()
    np.save("tokens/a.npy", np.arange(32 * 8 * 64, dtype=np.uint16).reshape(-1, 64))
    text = succeed(zb, "convert", "--help").stdout
    [line] = re.findall(r"Example: (zb convert .*)", text)
    assert "4 shards" in succeed(zb, *shlex.split(line)[1:]).stdout


# --- the list of formats -----------------------------------------------------------------------------------------
def test_the_list_is_cell_by_cell_that_of_earlier_builds():
    """`tests/data/convert_list.txt` was printed before the formats became one list."""
    expected = (ROOT / "tests" / "data" / "convert_list.txt").read_text(encoding="utf-8").splitlines()
    found = succeed(zb, "convert", "--list").stdout.splitlines()
    assert [line.rstrip() for line in found[: len(expected)]] == [line.rstrip() for line in expected]


def test_the_list_has_every_format_and_what_it_can():
    listed = report_of(zb, "convert", "--list")["formats"]
    assert {*sources(), *target_names()} <= listed.keys()
    assert {name for name, found in listed.items() if found["is_source"]} == {*sources()}
    assert {name for name, found in listed.items() if found["is_target"]} == {*target_names()}
    assert listed["hdf5"] == dict.fromkeys(listed["hdf5"], True)
    assert (listed["batch"]["documents"], listed["parquet"]["in_place"], listed["parquet"]["shard_range"]) == (
        False, False, False,
    )  # fmt: skip
    parts = ("shard_range", "shard_range_to_stream", "out_in_parts")
    assert [listed["parquet"][name] for name in parts] == [False, True, True]
    assert [listed["batch"][name] for name in parts] == [True, False, True]
    lines = succeed(zb, "convert", "--list").stdout.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith(("jsonl ", "stream "))] == [
        ["yes", "yes"], ["stream", "-"],
    ]  # fmt: skip
    assert lines[0].split() == [
        "format",
        "in",
        "place",
        "in",
        "out",
        "documents",
        "fields",
        "--resume",
        "--shard-range",
        *("out", "in", "parts"),
    ]
    assert {line.split()[0] for line in lines[1:]} == listed.keys()
    assert [line.split()[1:] for line in lines if line.startswith("hdf5 ")] == [["yes"] * 8]
    assert succeed(zb, "convert", "--list", "--quiet").stdout == ""


# --- completion --------------------------------------------------------------------------------------------------
def completed(*words):
    """Return what a shell offers for the last word."""
    *given, incomplete = words
    found = BashComplete(zb, {}, "zb", "_ZB_COMPLETE").get_completions([*given], incomplete)
    return [each.value if each.type == "plain" else each.type for each in found]


@pytest.mark.parametrize(("words", "expected"), [
    (("convert", "--bat"), ["--batch-size"]),
    (("convert", "tokens", "--to"), ["--tokenizer", "--tokens-only", "--to"]),
    (("convert", "tokens", "out", "--packing", "b"), ["best-fit"]),
    (("convert", "--from", "j"), ["jsonl"]),
    (("convert", "tokens", "--to", "b"), ["batch", "bin"]),
    (("convert", "np"), ["file", "npy-to-batch", "npy-to-hdf5", "npy-to-stream"]),
    (("convert", ""), ["file"]),
    (("convert", "tokens", ""), ["file"]),
    (("convert", "npy-to-hdf5", "--bat"), ["--batch-size"]),
    (("ve",), ["verify"]),
    (("index", "d"), ["digests"]),
    (("show", "train", "--to"), ["--tokenizer", "--tokens"]),
    *(((name, ""), ["file"]) for name in ("info", "report", "stage", "which")),
])  # fmt: skip
def test_a_shell_completes_options_formats_paths_and_pairs(words, expected):
    assert sorted(completed(*words)) == sorted(expected)


def lines_of_completion():
    """Return the line of each shell on the page of commands: that is added to its start."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    lines = re.findall(r"^echo '(.*)' >> ~/(\S+)$", text, re.MULTILINE)
    return {re.search(r"=(\w+)_source zb", line)[1]: (line, file) for line, file in lines}


def test_the_page_has_the_line_of_each_shell_and_it_gives_a_script():
    assert {shell: file for shell, (_, file) in lines_of_completion().items()} == {
        "bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/config.fish",
    }  # fmt: skip
    for group, name, variable in ((zb, "zb", "_ZB_COMPLETE"), (convert_commands, "convert", "_CONVERT_COMPLETE")):
        for shell, word in (("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --no-files")):
            done = CliRunner().invoke(group, [], prog_name=name, env={variable: f"{shell}_source"})
            assert (done.exit_code, word in done.stdout, f"{variable}={shell}_complete" in done.stdout) == (
                0,
                True,
                True,
            )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_line_of_bash_completes_in_bash(tmp_path):
    (tmp_path / "zb").write_text(f"#!{sys.executable}\nfrom zb_hdf5.__main__ import zb\nzb()\n")
    (tmp_path / "zb").chmod(0o755)
    line, _ = lines_of_completion()["bash"]
    script = f"{line}\nCOMP_WORDS=(zb ver) COMP_CWORD=1\n_zb_completion zb\necho ${{COMPREPLY[@]}}; complete -p zb"
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", "--norc", "-c", script]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
    assert (done.stdout.split()[0], "_zb_completion" in done.stdout, done.stderr) == ("verify", True, "")


#: Folders of other trainers, and the options that name their format.
WRONG_DOORS = {
    "megatron/uint16": "--from megatron",
    "datatrove/uint16": "--from datatrove",
    "mds/zstd": "--from mds",
    "litdata/array": "--from litdata",
    "hf/saved": "--from hf",
    "bin/gpt2": "--from bin",
    "bin/nanogpt": "--from bin --source-dtype uint16",
    "olmo/uint16": "--from olmo --source-dtype uint16",
    "olmo": "--from olmo --source-dtype uint16",
}


#: Those of them that are token streams.
STREAMS = {"megatron/uint16", "datatrove/uint16", "bin/gpt2"}


@pytest.mark.parametrize(("pair", "folder"), [
    *(("npy-to-hdf5", folder) for folder in WRONG_DOORS),
    *(("hdf5-to-batch", folder) for folder in WRONG_DOORS),
    *(("stream-to-hdf5", folder) for folder in sorted(WRONG_DOORS.keys() - STREAMS)),
])  # fmt: skip
@pytest.mark.thin
def test_a_pair_on_files_of_another_trainer_ends_in_the_line_to_type(pair, folder, tmp_path):
    message = one_error(run(convert_commands, pair, TRAINERS / folder, tmp_path / "out", "--quiet"))
    _, _, line = message.splitlines()[-1].partition(": zb convert ")
    options = WRONG_DOORS[folder] + (" --to batch" if pair == "hdf5-to-batch" else "")
    source = TRAINERS / ("olmo/uint16" if folder == "olmo" else folder)
    assert line == f"{source} {tmp_path / 'out'} {options}", message
    size = ("--batch-size", 2, "--seq-len", 16, "--quiet") if pair == "npy-to-hdf5" else ("--dry-run", "--help")
    succeed(convert_commands, *shlex.split(line), *size)


def test_files_of_the_named_format_get_no_other_line(inputs, tmp_path):
    (tmp_path / "damaged.npy").write_bytes((inputs["npy"] / "a.npy").read_bytes()[:200])
    for word in ((), ("--from", "npy"), ("npy-to-hdf5",)):
        rest = (tmp_path / "damaged.npy", tmp_path / "out")
        message = one_error(run(convert_commands, *word, *rest))
        assert "zb convert" not in message
    message = one_error(run(convert_commands, "--from", "npy", TRAINERS / "megatron/int32", tmp_path / "a b"))
    assert message.endswith(f"zb convert {TRAINERS / 'megatron/int32'} '{tmp_path / 'a b'}' --from megatron")
