"""Messages that end in a line to type and have no remedy: each line is typed as it stands, and cures.

Such a line comes from a call of `conversion_call` or `merge_call`, or is a text of a command. `CALLS` and `TEXTS` have
all of them, as two tests prove; `test_typed_remedies.py` types the lines of remedies, and
`commands/test_wrong_doors.py` those of many more files.
"""

import ast
import contextlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest
from commandline import commands_of, run_zb
from doors import IDS, litdata, made, raw, splits
from modules import FILES

from zb_hdf5 import convert
from zb_hdf5.commands.zb import zb
from zb_hdf5.console import TYPED
from zb_hdf5.errors import conversion_call, merge_call


@dataclass(frozen=True)
class Met:
    """A message with lines to type."""

    files: Callable[[], None]
    line: str
    #: Words that `zb info` prints of the path that the lines make; "": of what they print themselves.
    made: str
    prints: str
    code: int = 1


def door(name):
    """Return what writes a file of another format."""
    return lambda: made(name, Path())


def two_data_sets():
    """Write two data sets of Hugging Face whose names tell no splits."""
    splits(Path("sets"))
    shutil.copytree("sets/train", "sets/other")
    Path("sets/dataset_dict.json").write_text(json.dumps({"splits": ["train", "other"]}))


def flat_dataset():
    with h5py.File("t.h5", "w") as h5:
        h5["tokens"] = np.tile(IDS, 8).astype("<u2")


def lines_of_text():
    Path("t.jsonl").write_text('{"text": "abc abc"}\n' * 9)


def mask_without_documents():
    """Write ids and a mask as open-instruct does, without the file that tells the documents."""
    Path("oi").mkdir()
    raw(Path("oi/token_ids_part_0000.npy"), "<u4")
    np.ones(len(IDS), bool).tofile("oi/labels_mask_part_0000.npy")


def two_parts():
    np.save("a.npy", IDS.astype("<u2").reshape(80, 50))
    for part in range(2):
        convert("a.npy", "hdf5", "out", batch_size=8, shards=2, shard_range=(part, 2))


def begun():
    two_parts()
    shutil.copytree("out.partial", "kept.partial")


def stored():
    np.save("a.npy", IDS.astype("<u2").reshape(80, 50))
    convert("a.npy", "hdf5", "st", batch_size=8)


#: Module and function that calls `conversion_call` or `merge_call` -> a failure whose message has the line of it.
CALLS = {
    ("zb_hdf5.text.lacking_text", "_way_of_ids"): Met(
        door("mine.jsonl"), "zb convert mine.jsonl d --to stream --tokenizer byte --text-column mine", "DST", "4,000"
    ),
    ("zb_hdf5.files.ways", "of_litgpt"): Met(door("lit.bin"), "zb info lit.bin", "DST", "4,000"),
    ("zb_hdf5.files.ways", "of_text"): Met(door("book.md"), "zb info book.md", "DST", "190"),
    ("zb_hdf5.trainers.hf", "_folders_of"): Met(two_data_sets, "zb info sets", "DST", "4,000"),
    ("zb_hdf5.formats.npy", "facts"): Met(door("rows.npy"), "zb info rows.npy", "DST", "80 before batching"),
    ("zb_hdf5.store.way_in", "way_of_documents"): Met(door("litdata"), "zb info litdata", "DST", "4,000"),
    ("zb_hdf5.store.way_in", "_of_file"): Met(
        lambda: litdata(Path("lit")), "zb info lit/chunk-0-0.bin", "DST", "4,000"
    ),
    ("zb_hdf5.store.way_in", "_call_for_text"): Met(door("text.jsonl"), "zb info text.jsonl", "DST", "13"),
    ("zb_hdf5.store.way_in", "_call_for_ids"): Met(door("mine.jsonl"), "zb info mine.jsonl", "DST", "4,000"),
    ("zb_hdf5.store.way_in", "_of_folder"): Met(door("several"), "zb info several", "DST", "4,000"),
    ("zb_hdf5.store.recognition", "headerless_name"): Met(
        door("litdata"), "zb info litdata --source-dtype uint16", "DST", "4,000", 2
    ),
    ("zb_hdf5.store.way_in", "_line_of_fairseq"): Met(door("a.idx"), "zb info a.idx", "DST", "4,000"),
    ("zb_hdf5.converters.parts_of_rows", "_lines"): Met(
        lines_of_text, "zb convert t.jsonl out --tokenizer byte --seq-len 8 --batch-size 2 --shard-range 0/2",
        "out", "of 2 x 8", 2,
    ),
    ("zb_hdf5.converters.resolution", "_line_for_name"): Met(
        door("a.parquet"), "zb convert a.parquet x.zarr --to stream", "x", "4,000"
    ),
    ("zb_hdf5.converters.source_records", "_require_documents"): Met(
        flat_dataset, "zb convert t.h5 out --to stream", "DST", "of 32 x 512"
    ),
    ("zb_hdf5.converters.packed_batches", "_no_documents"): Met(
        mask_without_documents, "zb convert oi rows --source-dtype uint32 --seq-len 50 --batch-size 1",
        "DST", "4,000", 2,
    ),
}  # fmt: skip
#: HDF5 files of documents, whose datasets may be named, too.
DOCUMENTS_IN_HDF5 = ("offsets.h5", "offsets", "lists.h5", "lists", "datasets.h5")
#: A text of the package that has a command with its arguments in quotes -> a failure, or an output, with that command.
TEXTS = {
    "'zb index merge ": Met(two_parts, "zb info out.partial", "out", "10 of 8 x 50", 0),
    "see 'zb info ": Met(begun, "zb info kept", "", "an interrupted conversion", 2),
    "'zb cache ls ": Met(stored, 'zb stage st "a b" --cache-bytes 1000', "", "1 store", 0),
}
#: A line without quotes at the end of a message, and a command in quotes: a path in it may have double quotes.
LINE = re.compile(r"""^(?:.*: )?(zb (?:convert|index merge) [^;\n]+)$|'(zb (?:"[^"]*"|[^'"])+)'""", re.MULTILINE)
COMMANDS = {name for name, _ in commands_of(zb)}
NAMES = {each.__name__ for each in (conversion_call, merge_call)}


@contextlib.contextmanager
def callers_of(*functions):
    """Return the modules and functions that call some functions meanwhile."""
    found = set()
    codes = {each.__code__ for each in functions}

    def note(frame, event, _):
        if event == "call" and frame.f_code in codes:
            frame = frame.f_back
            while frame.f_code.co_name.startswith("<"):
                frame = frame.f_back
            found.add((frame.f_globals["__name__"], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def lines_in(printed):
    """Return the lines to type of a message, but for the names of commands."""
    found = [bare or quoted for bare, quoted in LINE.findall(printed)]
    return [line for line in found if line.removeprefix("zb ") not in COMMANDS]


def jobs_of(line):
    """Return the lines of the jobs of an array, of which a message has the first."""
    return [line, line.replace("0/2", "1/2")] if "--shard-range 0/2" in line else [line]


def typed_after(met):
    """Meet a message, and type its lines; return the message."""
    met.files()
    with callers_of(conversion_call, merge_call) as callers:
        printed = run_zb(*shlex.split(met.line)[1:], code=met.code).output
    lines = lines_in(printed)
    assert lines, printed
    output = "".join(run_zb(*shlex.split(job)[1:], code=0).output for line in lines for job in jobs_of(line))
    if met.made:
        output = run_zb("info", met.made, code=0).output
    assert met.prints in output, (lines, output)
    return callers, printed


@pytest.mark.slow
@pytest.mark.parametrize("caller", CALLS, ids="".join)
def test_the_line_of_a_call_is_typed_and_cures(caller, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callers, _ = typed_after(CALLS[caller])
    assert caller in callers


def hdf5_of_documents(name):
    """Write an HDF5 file of documents, or a folder of one."""
    path = Path(name) if name.endswith(".h5") else Path(name) / "a.h5"
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as h5:
        if name.startswith("lists"):
            h5.create_dataset("input_ids", (80,), h5py.vlen_dtype("<i4"))[...] = IDS.reshape(80, 50)
        elif name.startswith("datasets"):
            for number, ids in enumerate(IDS.reshape(80, 50)):
                h5[f"{number:02}"] = ids
        else:
            h5["input_ids"] = IDS.astype("<i4")
            h5["offsets"] = np.arange(0, 4001, 50)


@pytest.mark.parametrize("name", DOCUMENTS_IN_HDF5)
@pytest.mark.thin
def test_the_line_for_documents_in_hdf5_is_typed_and_cures(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    met = Met(lambda: hdf5_of_documents(name), f"zb info {name}", "DST", "4,000")
    callers, printed = typed_after(met)
    assert ("zb_hdf5.store.way_in", "way_of_documents") in callers
    assert f"{name}: has HDF5 files of documents, which are not read in place: zb convert {name} DST" in printed


@pytest.mark.parametrize("text", TEXTS)
def test_the_line_of_a_text_is_typed_and_cures(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, printed = typed_after(TEXTS[text])
    assert text in printed


def trees_with(*words):
    """Yield the name of each module whose text has one of some words, and its tree."""
    for module, path in FILES.items():
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield module, ast.parse(text)


def test_each_call_that_becomes_a_line_is_met():
    found = set()
    for module, tree in trees_with(*NAMES):
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                called = {getattr(node.func, "id", "") for node in ast.walk(function) if isinstance(node, ast.Call)}
                found |= {(module, function.name)} if called & NAMES else set()
    assert found == {*CALLS}


def test_each_command_in_quotes_is_typed_or_a_name():
    texts = set()
    for _, tree in trees_with("'zb "):
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        constants = {node for node in ast.walk(tree) if isinstance(node, ast.Constant)} - docstrings
        texts |= {node.value for node in constants if isinstance(node.value, str)}
    lines = {text: re.findall(r"'zb ([a-z][^']*)(?:'|$)", text) for text in texts - {*TYPED.values()}}
    assert {text for text, named in lines.items() if not COMMANDS.issuperset(named)} == {*TEXTS}
