"""The helps of all commands: their examples run as printed, and print reports."""

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import h5py
import numpy as np
import pins
import pytest
from commandline import commands_of, run_zb, succeed
from contents import write_batches, write_stream

from zb_hdf5 import Loader, MixedLoader, open_field_set, train_tokenizer
from zb_hdf5.commands import timing
from zb_hdf5.commands.zb import FIRST, zb
from zb_hdf5.converters.cli import convert_commands as convert

ROOT = Path(__file__).parents[2]
MEGATRON = ROOT / "tests" / "data" / "trainers" / "megatron" / "uint16"
RNG = np.random.default_rng(1)
TEXTS = [" ".join(map(str, RNG.integers(0, 10_000, 600))) for _ in range(60)]


COMMANDS = {name: command for name, command in commands_of(zb) if not isinstance(command, click.Group)}
GROUPS = {name: command for name, command in commands_of(zb) if isinstance(command, click.Group)}


def examples_of(name):
    """Return the lines of the examples in the help of a command, as arguments."""
    if name == "fetch":  # what is there already needs no server; tests/remote/test_fetch.py has one
        return [["zb", "fetch", "http://localhost/s_{}.parquet", "-n", "1", "-o", "."]]
    text = {**COMMANDS, **GROUPS}[name].help.partition("Example: ")[2].replace("\\\n", " ").replace("Example: ", "")
    return [shlex.split(line.replace("$TMPDIR", "tmp")) for line in text.strip().splitlines()]


def made_by(name):
    """Return the outputs of the examples of a command that lie in the folder of its sources."""
    made = {line[4] for line in examples_of(name) if line[1] == "convert" and not line[3].startswith("-")}
    others = {"index rebuild": "data/train/shards.json", "tokenizer train": "tok.json", "fields make": "text-h5/fields"}
    return made | ({others[name]} if name in others else set())


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
    (folder / "their-h5").mkdir()
    with h5py.File(folder / "their-h5" / "one.h5", "w") as h5:
        h5["tokens"] = RNG.integers(0, 50_257, 40_000).astype("<i4")
        h5["weights"] = np.zeros(10)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "books" / "one.txt").write_text(" ".join(TEXTS))
    parquet.write_table(table({"text": TEXTS}), folder / "corpus" / "one.parquet")
    train_tokenizer(folder / "corpus.jsonl", folder / "tok.json", 300)
    stored = (("npy-to-hdf5", "tokens", "train-h5"), ("npy-to-batch", "tokens", "train-batch"))
    for name, *paths in (*stored, ("npy-to-stream", "tokens", "stream", "--boundary-token-id=50256")):
        paths = [part if part.startswith("-") else str(folder / part) for part in paths]
        succeed(convert, name, *paths, "--quiet")
    return folder


@pytest.fixture(scope="module")
def data(folder, tmp_path_factory):
    """Return a folder with the stores, states and files that the other examples name."""
    made = tmp_path_factory.mktemp("data")
    (made / "data").mkdir()
    for source in ("corpus", "tok.json"):
        (shutil.copytree if (folder / source).is_dir() else shutil.copy)(folder / source, made / source)
    tokens = RNG.integers(0, 300, 9_700 * 8).astype(np.uint16)
    np.save(made / "tokens.npy", tokens.reshape(-1, 8))
    for name in ("train", "web", "code"):
        words = ["npy-to-hdf5", made / "tokens.npy", made / "data" / name, "--batch-size=1", "--shards=2", "--quiet"]
        succeed(convert, *words)
    with Loader(made / "data/train", rank=0, world_size=1) as loader:
        (made / "loader.json").write_text(json.dumps(loader.state_dict()))
    sources = {name: made / "data" / name for name in ("web", "code")}
    with MixedLoader(sources, dict.fromkeys(sources, 0.5), rank=0, world_size=1) as loader:
        (made / "mixed.json").write_text(json.dumps(loader.state_dict()))
    for name in ("stream.h5", "genome.h5"):
        write_stream(made / name, np.resize(tokens, 120_000), np.full(12, 10_000), dtype="uint16")
    for name in ("train.batch", "train.h5"):
        write_batches(made / "data" / name, tokens[:64].reshape(-1, 2, 8), dtype="uint16")
    (made / "data/train.h5").rename(made / "data/train.h5.partial")
    (made / "data/train.batch.crc32").unlink()
    with open_field_set(made / "data/train", "teacher", {"weight": "f4"}) as teacher:
        for found in teacher.missing(batch_size=500, quiet=True):
            teacher.write(found["records"], weight=found["tokens"].float())
    lines = (json.dumps({"text": text, "lang": "en"}) + "\n" for text in TEXTS)
    (made / "said.jsonl").write_text("".join(lines))
    words = ["--tokenizer=byte", "--seq-len=64", "--batch-size=2", "--metadata-columns=lang", "--quiet"]
    succeed(convert, "jsonl-to-hdf5", made / "said.jsonl", made / "text-h5", *words)
    succeed(zb, "fields", "make", made / "text-h5", "lang", "--meta", "lang")
    with Loader(made / "text-h5", rank=0, world_size=1) as loader:
        (made / "text.json").write_text(json.dumps(loader.state_dict()))
    (made / "s_0.parquet").write_bytes(b"fetched")
    for file in MEGATRON.iterdir():
        shutil.copy(file, made / f"corpus{file.suffix}")
    for part in ("0/2", "1/2"):
        succeed(convert, "npy-to-hdf5", made / "tokens.npy", made / "train-h5", "--shards=2", "--shard-range", part)
    return made


def test_each_example_of_a_group_is_that_of_a_command():
    shown = {shlex.join(line) for name in COMMANDS for line in examples_of(name)}
    for name in GROUPS.keys() - {"zb", "convert"}:
        assert {shlex.join(line) for line in examples_of(name)} <= shown, name


def test_the_examples_of_zb_run_one_after_the_other(folder, tmp_path, monkeypatch):
    assert [" ".join(line) for line in examples_of("zb")] == [*FIRST][:2]
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)
    for line in FIRST:
        if not line.startswith("zb bench"):  # its own example runs, with fewer rounds
            assert succeed(zb, *shlex.split(line)[1:]).stdout


def test_zb_alone_names_the_commands_that_are_typed_first():
    done = run_zb(code=0)
    shown = re.findall(r"^  (zb (\w+) .*?)  ", done.stdout, re.MULTILINE)
    assert [example for example, _ in shown] == [*FIRST]
    assert {name for _, name in shown} < {*zb.list_commands(click.Context(zb))}
    assert max(map(len, done.stdout.splitlines())) <= 100


#: All examples as they are printed; with the options of reports, some for every day.
REPORTS = [
    pytest.param(name, option, marks=pytest.mark.thin if option else ())
    for option in ("", "--json", "--quiet")
    for name in sorted(COMMANDS)
    if name != "fields upload"  # to a bucket, which tests/remote/test_remote_sets.py has
]


#: Keys whose own keys depend on the data.
OF_THE_DATA = {
    "source",
    "tokenizer",
    "fields",
    "free",
    "tokens_dropped",
    "batches_of_split",
    "documents_dropped",
    "counts",
}
#: Keys whose own keys are names, of objects with documented keys.
OF_NAMES = {"formats", "splits", "document_lengths"}


def keys_in(found, *, is_named=True):
    """Return all keys of a report: of objects in it too, but none that depends on the data."""
    if isinstance(found, list):
        return set().union(*map(keys_in, found))
    if not isinstance(found, dict):
        return set()
    keys = set(found) if is_named else set()
    for key, value in found.items():
        if key not in OF_THE_DATA:
            keys |= keys_in(value, is_named=key not in OF_NAMES)
    return keys


def keys_on_the_page(name):
    """Return the keys that the page has for a command."""
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    for heading, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE):
        if any(f"zb {name} ".startswith(f"{command} ") for command in heading.split(", ")):
            return re.findall(r"`(\w+)`", text)
    raise AssertionError(f"no part of the page is about {name}")


ROWS = ("--seq-len", 64, "--batch-size", 2)
FINISHED = [("fields", "finish", "data/train", "teacher")]
#: Part of the page -> commands that print the keys which neither the examples nor the pinned reports have.
ALSO = {
    "zb info": [
        ("info", "damaged"), ("info", "others"), ("info", "named"), ("info", "train-h5.partial"), ("info", "unfit.h5"),
    ],
    "zb show": [("show", "text-h5", "--batch", 0, "--field-set", "lang")],
    "zb report": [("report", "packed", "-o", "page.html")],
    "zb convert": [
        ("convert", "--list"),
        *FINISHED,
        ("convert", "hdf5-to-batch", "data/train", "copy"),
        ("convert", "others", "others-h5", "--batch-size", 1, "--seq-len", 8),
        ("convert", "tokens.npy", "dry", "--batch-size", 1, "--memory", "1GiB", "--dry-run"),
        ("tokenizer", "train", "said.jsonl", "-o", "new.json", "--vocab-size", 300),
        *[("convert", "jsonl-to-hdf5", "said.jsonl", "said-h5", "--tokenizer", "new.json", "--resume", *ROWS)] * 2,
    ],
    "zb fields": [("fields", "info", "text-h5", "claimed")],
    "zb stage, zb cache, zb fetch": [*FINISHED, ("stage", "data/train", "tmp/own", "--field-set", "teacher")],
}  # fmt: skip
#: Names that users have chosen.
NAMES_OF_SETS = {"lang", "lang/code", "teacher"}
#: A key of `zb fields upload`, which tests/remote/test_remote_sets.py runs: it needs a bucket.
OF_BUCKETS = {"url"}


@pytest.fixture(scope="module")
def odd(data, tmp_path_factory):
    """Return a copy of the data, with paths of which the reports have more keys."""
    made = tmp_path_factory.mktemp("odd") / "data"
    shutil.copytree(data, made)
    shutil.copytree(made / "text-h5", made / "damaged")
    next((made / "damaged").glob("documents-*")).unlink()
    for name in ("others/0.npy", "named/train_0.npy", "named/val_0.npy"):
        (made / name).parent.mkdir(exist_ok=True)
        np.save(made / name, np.arange(100, dtype=np.uint16))
    (made / "others" / "0.txt").write_text("some text")
    tokens = np.arange(64, dtype=np.uint16).reshape(4, 2, 8)
    write_batches(made / "unfit.h5", tokens, {"labels": tokens + 0.5}, fields={"labels": ("f8", ())})
    words = ["--tokenizer=byte", "--seq-len=64", "--batch-size=2", "--packing=best-fit", "--workers=1", "--quiet"]
    succeed(convert, "jsonl-to-hdf5", made / "said.jsonl", made / "packed", *words)
    with open_field_set(made / "text-h5", "claimed", {"weight": "f4"}) as claimed:
        next(iter(claimed.missing(batch_size=1, quiet=True)))
        yield made


def keys_of(found):
    """Return all keys of a report, also those that depend on the data."""
    if isinstance(found, dict):
        return {*found}.union(*map(keys_of, found.values()))
    return set().union(*map(keys_of, found)) if isinstance(found, list) else set()


def pinned_keys(commands):
    """Return the keys of the reports that `test_pins.py` compares with what commands print today."""
    found = set()
    for case, value in pins.load().items():
        group, _, name = case.partition("/")
        lines = pins.JOBS[name][1] if group == "jobs" else [(command,) for command in value if group == "reports"]
        reports = value.values() if group == "reports" else value
        for line, report in zip(lines, reports if lines else (), strict=True):
            words = f"zb {' '.join(map(str, line[:2]))} "
            if any(words.startswith(f"{command} ") for command in commands):
                found |= keys_of(report[1])
    return found


PARTS = re.findall("^## (zb .*)$", (ROOT / "docs" / "json.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS)
def test_each_key_on_the_page_is_printed_by_a_real_command(part, odd, tmp_path, monkeypatch):
    commands = part.split(", ")
    shutil.copytree(odd, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(timing, "PASS_BYTES", {False: 1 << 14})
    names = [name for name in COMMANDS if any(f"zb {name} ".startswith(f"{each} ") for each in commands)]
    own = [name for name in names if name.split()[0] != "convert" and name != "fields upload"]
    lines = [line[1:] for name in own for line in examples_of(name)]
    printed = pinned_keys(commands)
    for line in [*ALSO.get(part, ()), *lines]:
        done = run_zb(*line, "--json")
        if done.stdout:  # an example may need what no other part needs: it has its own test
            found = json.loads(done.stdout)
            known = {"version", *keys_on_the_page(" ".join(map(str, line))), *NAMES_OF_SETS}
            assert keys_in(found) <= known
            printed |= keys_of(found)
    words_of_commands = {word for name in COMMANDS for word in name.split()}
    assert {*keys_on_the_page(names[0])} - printed - words_of_commands - OF_BUCKETS == set()


@pytest.mark.parametrize(("name", "option"), REPORTS)
def test_examples_run_as_printed_and_report_lines_json_or_nothing(name, option, folder, data, tmp_path, monkeypatch):
    shutil.copytree(folder if name.startswith("convert ") else data, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    if name == "bench":
        monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
        monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
        monkeypatch.setattr(timing, "_data_loader", lambda path, options, _: timing._open_loader(path, options))
    monkeypatch.setattr(timing, "PASS_BYTES", {False: 1 << 14})  # of 150 KiB, which are read many times
    if name.startswith("cache"):
        with Loader("data/train", rank=0, world_size=1, cache="tmp/cache") as loader:
            next(loader)
    for path in map(Path, made_by(name)):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for program, *arguments in examples_of(name):
        assert program == "zb"
        done = succeed(zb, *arguments, *filter(None, [option]))
        assert done.stderr == ""
        if option == "--json":
            found = json.loads(done.stdout)
            assert next(iter(found)) == "version"
            assert keys_in(found) <= {"version", *keys_on_the_page(name)}
        else:
            assert (bool(done.stdout), "  " in done.stdout) == (not option, not option)
            assert "\x1b" not in done.stdout
