"""Remedies: the library names them in the words of Python, the command line by the command to type."""

import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from commandline import run_zb
from contents import write_batches

from zb_hdf5 import ExistsError, FormatError, IncompleteError, ZbError
from zb_hdf5.console import TYPED, message_of
from zb_hdf5.errors import Remedy
from zb_hdf5.spec import INDEX_NAME


def fail_in_worker(path):
    error = IncompleteError(f"{path}: cut", remedy=Remedy.REPAIR, at=path)
    error.add_note("a note")
    raise error


def find_in_worker(path):
    raise ExistsError(f"{path}: exists already")


def test_the_command_to_type_takes_the_place_of_the_words_but_not_in_a_quoted_error():
    assert set(TYPED) == set(Remedy)
    assert len(set(Remedy)) == len(list(Remedy))
    for remedy in Remedy:
        error = FormatError("/a{b}: expected 1, found 2", remedy=remedy, at="/a{b}")
        assert str(error) == f"/a{{b}}: expected 1, found 2; {remedy.about('/a{b}')}"
        assert error.facts == "/a{b}: expected 1, found 2"
        assert message_of(error) == f"{error.facts}; {TYPED[remedy].replace('{at}', '/a{b}')}"
        assert re.search(r"'zb \w+|--\w+|'export \w+=", message_of(error))
    for remedy in (Remedy.REPAIR, Remedy.REBUILD, Remedy.REBUILD_FORCE, Remedy.CRC32):  # which refuse a URL
        message = message_of(FormatError("expected 1, found 2", remedy=remedy, at="s3://bucket/train"))
        assert "s3://" not in message
        assert message.endswith(" COPY', where COPY is it, copied to this machine")
    assert "'zb verify s3://b/t'" in message_of(FormatError("x", remedy=Remedy.VERIFY, at="s3://b/t"))
    # an error that another one quotes has no path
    error = FormatError(f"x: {FormatError('y: bad', remedy=Remedy.VERIFY, at='y')}")
    assert message_of(error) == str(error)
    error = ZbError("a: b")
    assert (str(error), error.facts, message_of(error), error.remedy) == ("a: b", "a: b", "a: b", None)


def test_a_path_with_spaces_is_one_word_of_a_command():
    error = IncompleteError("a b$/x.h5: its writer has not finished", remedy=Remedy.REPAIR, at="a b$/x.h5")
    assert message_of(error).endswith("run 'zb repair \"a b\\$/x.h5\"'")
    assert message_of(FormatError("no", remedy=Remedy.VERIFY, at="tøkens/x.h5")).endswith("run 'zb verify tøkens/x.h5'")
    left_out = FormatError("bad", remedy=Remedy.LEAVE_OUT, at="25 batches")
    assert "leave its 25 batches out" in message_of(left_out)


def test_a_remedy_survives_the_way_out_of_a_process(tmp_path):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(IncompleteError) as caught:
            pool.submit(fail_in_worker, tmp_path).result()
        with pytest.raises(ExistsError) as found:
            pool.submit(find_in_worker, tmp_path).result()
    error = caught.value
    assert (error.facts, error.remedy, error.at) == (f"{tmp_path}: cut", Remedy.REPAIR, str(tmp_path))
    assert "a note" in error.__notes__
    assert message_of(error) == f"{tmp_path}: cut; if no writer is at work on it, run 'zb repair {tmp_path}'"
    assert message_of(found.value) == f"{tmp_path}: exists already; pass --force to replace it"


def write(path, *, backend="hdf5"):
    path.parent.mkdir(exist_ok=True)
    tokens = np.arange(48, dtype=np.uint16).reshape(3, 2, 8)
    return write_batches(path, tokens, backend=backend).path


def unfinished_shard(tmp_path):
    folder = tmp_path / "store"
    write(folder / "shard-00000-of-00002.h5")
    partial = write(folder / "other.h5").rename(folder / "shard-00001-of-00002.h5.partial")
    cure = [f"repair {partial}", f"index rebuild {folder}"]
    return "index rebuild", folder, 4, f"if no writer is at work on it, run 'zb repair {partial}'", cure


def unfinished_conversion(tmp_path):
    folder = tmp_path / "store.partial"
    folder.mkdir()
    return "verify", folder, 4, f"'zb info {folder}' shows its progress", []


def killed_live_writer(tmp_path):
    folder = tmp_path / "live"
    script = (
        "import os, sys; import numpy as np; from zb_hdf5 import open_writer\n"
        "writer = open_writer(sys.argv[1], batch_size=2, seq_len=8, dtype='uint16', live=True, shard_batches=4)\n"
        "writer.write(np.zeros((2, 8), 'u2')); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, folder], check=True)
    cure = [f"repair {folder}", f"verify {folder}"]
    return "verify", folder, 4, f"if no writer is at work on it, run 'zb repair {folder}'", cure


def lone_batch_file(tmp_path):
    path = write(tmp_path / "x.batch", backend="batch")
    path.with_name("x.batch.crc32").unlink()
    expected = f"restore it, or make one of the batches as they are now with 'zb index crc32 {path}'"
    return "verify", path, 6, expected, [f"index crc32 {path}", f"verify {path}"]


def fields_that_do_not_fit(tmp_path):
    write_batches(tmp_path / "x.h5", np.ones((1, 2, 4), int), {"mask": np.ones((1, 2, 4), int)}, fields={"mask": "u1"})
    return (
        f"convert hdf5-to-batch {tmp_path / 'x.h5'}",
        tmp_path / "out",
        1,
        "leaves behind the field mask; convert to HDF5, or pass --tokens-only",
        [f"convert hdf5-to-batch {tmp_path / 'x.h5'} {tmp_path / 'out'} --tokens-only"],
    )


def another_program(tmp_path):
    import h5py

    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5["tokens"], h5["mask"] = np.ones((2, 4), "u2"), np.ones((2, 3), "u1")
    expected = "; pass --dataset to 'zb info', 'zb show' or 'zb convert', with one of its integer datasets: mask (2, 3)"
    return "info", tmp_path / "x.h5", 1, expected, [f"info {tmp_path / 'x.h5'} --dataset mask"]


CASES = [
    unfinished_shard, unfinished_conversion, killed_live_writer, lone_batch_file, fields_that_do_not_fit,
    another_program,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_command_that_fails_names_the_next_one_which_cures_it(case, tmp_path):
    command, path, code, expected, cure = case(tmp_path)
    result = run_zb(*command.split(), path)
    assert (result.exit_code, expected in result.output) == (code, True), result.output
    for line in cure:
        run_zb(*line.split(), code=0)


def edit_index(store):
    text = (store / INDEX_NAME).read_text()
    (store / INDEX_NAME).write_text(text.replace('"seq_len": 8', '"seq_len": 4'))


def swap_shard(store):
    write_batches(store / "other.h5", np.ones((3, 2, 8), np.uint16), dtype="uint16")
    os.replace(store / "other.h5", store / LAST)


def cut_index(store):
    (store / INDEX_NAME).write_bytes(b"")


def cut(store):
    """Cut the last shard short."""
    os.truncate(store / LAST, (store / LAST).stat().st_size - 500)


def lose(*names):
    return lambda store: [(store / name).unlink() for name in names]


LAST = "shard-00001-of-00002.h5"


@pytest.mark.parametrize(("damage", "command", "code", "expected"), [
    (lose(INDEX_NAME), "info", 1, "restore the index, or run 'zb index rebuild {store}'"),
    (cut_index, "verify", 3, "(char 0); restore the index, or run 'zb index rebuild {store}'"),
    (edit_index, "verify", 3, "restore the index, or run 'zb index rebuild {store}'"),
    (swap_shard, "repair", 1, "if the shards are the right ones, run 'zb index rebuild --force {store}'"),
    (lose(LAST), "repair", 1, "restore it, or pass --force to leave its 3 batches out of the store"),
    (cut, "repair", 4, "); restore it, or pass --force to leave its 3 batches out of the store"),
    (lose(LAST, INDEX_NAME), "index rebuild", 4, "restore them, or pass --force to do without"),
    (lose(), "index rebuild", 1, "exists already, and is valid; pass --force to replace it"),
])  # fmt: skip
def test_a_command_of_a_damaged_store_names_the_next_one_which_cures_it(damage, command, code, expected, tmp_path):
    store = tmp_path / "store"
    for number in range(2):
        write(store / f"shard-0000{number}-of-00002.h5")
    assert run_zb("index", "rebuild", store).exit_code == 0
    damage(store)
    result = run_zb(*command.split(), store)
    assert (result.exit_code, expected.format(store=store) in result.output) == (code, True), result.output
    named = re.search(r"run 'zb ([^']+)'", result.output)
    run_zb(*(named[1] if named else f"{command} {store} --force").split(), code=0)
    run_zb("verify", store, code=0)


def test_text_without_a_tokenizer_names_the_command_that_makes_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    result = run_zb("convert", tmp_path / "a.jsonl", tmp_path / "out", "--seq-len", 4, code=2)
    assert "need --tokenizer, which 'zb tokenizer train' makes of text; " in result.output
    result = run_zb("convert", tmp_path / "a.jsonl", tmp_path / "out", "--tokenizer", "gone.json", code=2)
    assert result.output.strip().endswith("or make one with 'zb tokenizer train TEXT -o tok.json'")
    (tmp_path / "a.jsonl").write_text('{"text": "abc abd"}\n' * 9)
    run_zb("tokenizer", "train", tmp_path / "a.jsonl", "--vocab-size", 260, "-o", tmp_path / "tok.json", code=0)
    how = ("--tokenizer", tmp_path / "tok.json", "--seq-len", 4, "--batch-size", 2)
    run_zb("convert", tmp_path / "a.jsonl", tmp_path / "out", *how, code=0)


def write_sources():
    """Write arrays, text, ids, HDF5 files and plain ids into the current folder."""
    import h5py

    np.save("a.npy", np.arange(80, dtype="<u2").reshape(10, 8))
    np.save("f.npy", np.asfortranarray(np.arange(80, dtype="<u2").reshape(10, 8)))
    np.arange(64, dtype="<u2").tofile("raw.bin")
    Path("t.jsonl").write_text('{"body": "abc abc abc"}\n' * 9)
    Path("i.jsonl").write_text('{"text": [1, 2, 3, 4]}\n' * 9)
    with h5py.File("u.h5", "w") as h5:
        h5.create_dataset("x", (64, 8), "<u2", chunks=(8, 8))[:8] = 1


#: A command that fails -> the end of its message, and the command as the message has it.
ADVICE = {
    "convert npy-to-hdf5 a.npy out --batch-size 4 --remainder error": (
        "2 are left over; pass --remainder drop, or --remainder pad if the source is not a store",
        "convert npy-to-hdf5 a.npy out --batch-size 4 --remainder pad",
    ),
    "convert npy-to-hdf5 a.npy out --batch-size 64": (
        "do not fill one batch of 64; pass a smaller --batch-size, or --remainder pad if the source is not a store",
        "convert npy-to-hdf5 a.npy out --batch-size 64 --remainder pad",
    ),
    "convert npy-to-hdf5 a.npy out --batch-size 5 --shards 9": (
        "2 batches cannot fill 9 shards; pass a smaller --shards",
        "convert npy-to-hdf5 a.npy out --batch-size 5 --shards 2",
    ),
    "convert npy-to-hdf5 a.npy out --batch-size 2 --seq-len 5": (
        "expected records of 5 tokens, found 8; pass --seq-len 8",
        "convert npy-to-hdf5 a.npy out --batch-size 2 --seq-len 8",
    ),
    "convert t.jsonl out --tokenizer byte --seq-len 8 --batch-size 2": (
        "pass --text-column with one of their keys: body",
        "convert t.jsonl out --tokenizer byte --seq-len 8 --batch-size 2 --text-column body",
    ),
    "convert i.jsonl out --tokenizer byte --seq-len 8 --batch-size 2": (
        "column 'text' has ids: zb convert i.jsonl DST --to stream --from hf --ids-column text",
        "convert i.jsonl out --to stream --from hf --ids-column text",
    ),
    "info u.h5": (
        "pass --unwritten drop to leave them out, or --unwritten fill to take the fill value 0 for them",
        "info u.h5 --unwritten fill",
    ),
    "info raw.bin": (
        "if it has ids and no header, pass their dtype, such as --source-dtype uint16",
        "info raw.bin --source-dtype uint16",
    ),
    "info f.npy": (
        "found Fortran order: zb convert f.npy DST --to hdf5 --batch-size 10 --seq-len 8",
        "convert f.npy out --to hdf5 --batch-size 10 --seq-len 8",
    ),
}


@pytest.mark.parametrize("command", ADVICE)
def test_the_option_that_a_message_names_cures_the_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources()
    advice, cure = ADVICE[command]
    result = run_zb(*command.split())
    assert result.exit_code > 0
    assert result.output.strip().endswith(advice)
    assert not Path("out").exists()
    run_zb(*cure.split(), code=0)
