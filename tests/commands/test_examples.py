"""The helps of all commands but the conversions: their examples run as printed."""

import json
import os
import re
import shlex
import shutil

import click
import numpy as np
import pytest
from click.testing import CliRunner

from zb_hdf5 import Loader, MixedLoader, open_writer
from zb_hdf5.commands.zb import zb

RNG = np.random.default_rng(1)
#: It needs a server: its example runs in `tests/remote`.
FAR = {"fetch"}


def commands_of(group, *names):
    """Yield the full names of the commands below a group, without the conversions, which have a test of their own."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands_of(command, *names, name) if name != "convert" else ()
        else:
            yield (*names, name), command


COMMANDS = {" ".join(names): command for names, command in commands_of(zb)}


def examples_of(help_text):
    """Return the lines of the examples of a help, as arguments."""
    text = help_text.partition("Example: ")[2].replace("\\\n", " ").replace("Example: ", "")
    return [shlex.split(os.path.expandvars(line)) for line in text.strip().splitlines()]


def run(*arguments):
    done = CliRunner().invoke(zb, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with all that the examples name: a store of 10,000 batches, for step 1200 of 8 ranks."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("tiktoken")
    folder = tmp_path_factory.mktemp("examples")
    (folder / "data").mkdir()
    (folder / "corpus").mkdir()
    for number in range(100):
        text = " ".join(map(str, RNG.integers(0, 10**6, 600)))
        (folder / "corpus" / f"{number}.txt").write_text(text)
    run("tokenizer", "train", folder / "corpus", "--vocab-size", 300, "-o", folder / "tok.json", "--quiet")
    tokens = RNG.integers(0, 256, 1_280_000).astype(np.uint16)
    tokens[999::1000] = 299
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "few.npy", tokens[:200_000])
    shape = ("--batch-size", 32, "--seq-len", 4, "--vocab-size", 300, "--quiet")
    run("convert", "npy-to-hdf5", folder / "tokens.npy", folder / "data" / "train", *shape)
    convert = ("convert", "npy-to-hdf5", folder / "few.npy")
    for name in ("web", "code"):
        run(*convert, folder / "data" / name, *shape, "--seed", len(name))
    for part in ("0/2", "1/2"):
        run(*convert, folder / "train-h5", *shape, "--shards", 2, "--shard-range", part)
    run("convert", "npy-to-batch", folder / "few.npy", folder / "data" / "train.batch", *shape)
    (folder / "data" / "train.batch.crc32").unlink(missing_ok=True)
    run("convert", "npy-to-stream", folder / "few.npy", folder / "stream.h5", "--boundary-token-id", 299, "--quiet")
    with open_writer(folder / "half.h5", batch_size=32, seq_len=4, dtype="uint16") as writer:
        writer.append(tokens[:128].reshape(32, 4))
        shutil.copy(folder / "half.h5.partial", folder / "data" / "train.h5.partial")
    with Loader(folder / "data" / "train", rank=0, world_size=8) as loader:
        next(loader)
        (folder / "loader.json").write_text(json.dumps(loader.state_dict()))
    sources = {name: folder / "data" / name for name in ("web", "code")}
    with MixedLoader(sources, dict.fromkeys(sources, 1.0), rank=0, world_size=1) as loader:
        (folder / "mixed.json").write_text(json.dumps(loader.state_dict()))
    return folder


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - FAR))
def test_the_examples_of_a_help_run_as_printed(name, folder, tmp_path, monkeypatch):
    place = tmp_path / "here"
    shutil.copytree(folder, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if name.startswith("cache "):
        run("stage", "stream.h5", tmp_path / "cache", "--batch-size", 8, "--seq-len", 64, "--quiet")
    if name == "index rebuild":
        (place / "data" / "train" / "shards.json").unlink()
    if name == "tokenizer train":
        (place / "tok.json").unlink()
        (place / "tok.tiktoken").unlink()
    examples = examples_of(COMMANDS[name].help)
    assert examples
    for program, *arguments in examples:
        assert program == "zb"
        assert arguments[: len(name.split())] == name.split()
        run(*arguments)


def test_each_command_has_an_example():
    assert not [name for name, command in COMMANDS.items() if not re.search(r"Example: zb ", command.help)]
