"""The helps of the conversions: their examples run as printed."""

import json
import re
import shlex
import shutil

import click
import numpy as np
import pytest
from click.testing import CliRunner

from zb_hdf5 import train_tokenizer
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert

RNG = np.random.default_rng(1)
TEXTS = [" ".join(map(str, RNG.integers(0, 10_000, 600))) for _ in range(60)]


def examples_of(name):
    """Return the lines of the example in the help of a command, as arguments."""
    [text] = re.findall(r"Example: (.*)", convert.commands[name].help, re.DOTALL)
    lines = text.replace("\\\n", " ").replace("Example: ", "").strip().splitlines()
    return [shlex.split(line) for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the sources that the examples name."""
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    pytest.importorskip("tokenizers")
    pytest.importorskip("tiktoken")
    folder = tmp_path_factory.mktemp("examples")
    for name in ("tokens", "corpus", "books"):
        (folder / name).mkdir()
    for number in range(2):
        tokens = RNG.integers(0, 50_257, 40_000).astype(np.uint16)
        tokens[999::1000] = 50_256
        np.save(folder / "tokens" / f"{number}.npy", tokens)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "books" / "one.txt").write_text(" ".join(TEXTS))
    parquet.write_table(table({"text": TEXTS}), folder / "corpus" / "one.parquet")
    train_tokenizer(folder / "corpus.jsonl", folder / "tok.json", 300)
    stored = (("npy-to-hdf5", "tokens", "train-h5"), ("npy-to-batch", "tokens", "train-batch"))
    for name, *paths in (*stored, ("npy-to-stream", "tokens", "stream", "--boundary-token-id=50256")):
        paths = [part if part.startswith("-") else str(folder / part) for part in paths]
        assert CliRunner().invoke(convert, [name, *paths, "--quiet"]).exit_code == 0
    return folder


@pytest.mark.parametrize("name", sorted(convert.commands))
def test_the_example_of_a_help_runs_as_printed(name, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {line[4] for line in examples_of(name) if not line[3].startswith("-")}
    for each in folder.iterdir():
        if each.name not in made:
            (shutil.copytree if each.is_dir() else shutil.copy)(each, tmp_path / each.name)
    for program, *arguments in examples_of(name):
        assert program == "zb"
        done = CliRunner().invoke(zb, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output


def test_no_help_has_two_notes_in_one():
    for command in convert.commands.values():
        context = click.Context(command)
        for option in command.params:
            text = (option.get_help_record(context) or ("", ""))[1]
            assert text.count("[default") <= 1
            assert "default: no]" not in text
    assert ".batch" not in str(CliRunner().invoke(convert, ["hdf5-to-hdf5", "--help"]).stdout)
