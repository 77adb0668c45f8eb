"""The files that a path stands for: every one is found once, or named; nothing is left out unseen."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zb_hdf5 import Loader, ReadAs, convert, open_reader
from zb_hdf5.commands.description import describe
from zb_hdf5.errors import ConvertError, FormatError, NotFoundError, UnavailableError
from zb_hdf5.files.listing import (
    SUFFIXES_OF_TOKENS,
    files_at,
    files_left_out,
    folders_in,
    left_out_in_words,
    listed,
    may_have,
    own_files,
)
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import any_path
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.digests import write_digests
from zb_hdf5.store.format_list import FORMATS
from zb_hdf5.store.verify import verify_store
from zb_hdf5.text.text_corpus import FILE_KINDS

#: A user who owns nothing here.
NOBODY = 65_534


def made(folder, *names):
    """Write files, each with its name in it."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def names_of(found, folder):
    return [path.relative_to(folder).as_posix() for path in found]


def read(folder, *suffixes):
    return names_of(listed(Look(folder), *suffixes).files, folder)


def test_all_levels_are_listed_in_the_order_of_the_names_in_each_folder(tmp_path):
    made(tmp_path, "b.npy", "a.npy", "a/z.npy", "a/b/0.npy", "a-b/1.npy", "B.NPY", "c.md", "é.npy")
    assert read(tmp_path, ".npy") == ["B.NPY", "a/b/0.npy", "a/z.npy", "a-b/1.npy", "a.npy", "b.npy", "é.npy"]
    paths = sorted(path for path in tmp_path.rglob("*") if path.suffix.lower() == ".npy")
    assert [*listed(Look(tmp_path), ".npy").files] == paths  # as conversions have read them from the beginning


def test_what_begins_with_a_dot_and_unfinished_results_are_left_out_without_a_word(tmp_path):
    names = [
        ".a.npy",
        "._b.npy",
        ".ipynb_checkpoints/c.npy",
        ".Trash-1000/files/d.npy",
        "x.partial/e.npy",
        "f.npy.partial",
    ]
    made(tmp_path, "a.npy", *names, "lost+found/g.npy", "sub/.hidden/h.npy")
    (tmp_path / ".#a.npy").symlink_to("me@host.123")  # as Emacs locks a file
    found = listed(Look(tmp_path), ".npy")
    assert (names_of(found.files, tmp_path), found.left_out) == (["a.npy"], ())


def test_a_hidden_or_unfinished_folder_that_is_named_is_listed(tmp_path):
    for folder in (".cache", "x.partial"):
        made(tmp_path / folder, "a.npy")
        assert read(tmp_path / folder, ".npy") == ["a.npy"]


def test_links_are_followed_and_each_folder_is_listed_once(tmp_path):
    far = made(tmp_path / "far", "0.npy", "deep/1.npy")
    folder = made(tmp_path / "in", "a/2.npy", "z/3.npy")
    (folder / "linked").symlink_to(far)
    (folder / "again").symlink_to(folder / "z")  # which is in it already, by its own name
    (folder / "z" / "loop").symlink_to("..")
    (folder / "2.npy").symlink_to(made(tmp_path / "files", "x") / "x")
    assert read(folder, ".npy") == ["2.npy", "a/2.npy", "linked/0.npy", "linked/deep/1.npy", "z/3.npy"]
    (far / "back").symlink_to(folder)
    assert read(folder, ".npy") == ["2.npy", "a/2.npy", "linked/0.npy", "linked/deep/1.npy", "z/3.npy"]


def test_a_folder_by_two_links_is_listed_by_the_first(tmp_path):
    far = made(tmp_path / "far", "0.npy")
    folder = made(tmp_path / "in", "a.npy")
    for name in ("y", "x"):
        (folder / name).symlink_to(far)
    assert read(folder, ".npy") == ["a.npy", "x/0.npy"]


def test_a_link_to_a_file_that_is_read_too_is_named(tmp_path):
    made(tmp_path, "b.npy", "c.npy")
    (tmp_path / "a.npy").symlink_to("b.npy")
    with pytest.raises(FormatError, match=r"a\.npy: is a link to a file that is read as .*/b\.npy too"):
        listed(Look(tmp_path), ".npy")
    (tmp_path / "b.npy").unlink()
    (tmp_path / "a.npy").unlink()
    os.link(tmp_path / "c.npy", tmp_path / "d.npy")  # a copy of its own, as far as anybody can tell
    assert read(tmp_path, ".npy") == ["c.npy", "d.npy"]


@pytest.mark.parametrize("name", ["a.npy", "sub/part", "README"])
def test_a_link_that_leads_nowhere_is_named(name, tmp_path):
    made(tmp_path, "b.npy", "sub/c.npy")
    (tmp_path / name).symlink_to("/nowhere/at/all")
    with pytest.raises(
        NotFoundError, match=f"{name}: expected a link to .* found one to /nowhere/at/all, which is not"
    ):
        listed(Look(tmp_path), ".npy")


def test_a_fifo_is_refused_and_never_opened(tmp_path):
    os.mkfifo(made(tmp_path, "a.npy") / "b.npy")
    os.mkfifo(tmp_path / "control")
    previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    try:
        for path in (tmp_path, tmp_path / "b.npy"):
            with pytest.raises(FormatError, match=r"b\.npy: expected a file, found a FIFO"):
                listed(Look(path), ".npy")
        assert read(tmp_path, ".h5") == []
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


#: Lists a folder as another user, and prints the error.
AS_NOBODY = f"""
import os, sys
from zb_hdf5.files.listing import listed
from zb_hdf5.files.look import Look
os.setegid({NOBODY}); os.seteuid({NOBODY})
try:
    print(listed(Look(sys.argv[1]), ".npy").files)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_folder_that_may_not_be_listed_is_an_error_that_names_it(is_linked, tmp_path):
    folder = made(tmp_path / "in", "a.npy")
    closed = made((tmp_path / "far") if is_linked else folder / "closed", "b.npy")
    if is_linked:
        (folder / "closed").symlink_to("../far")
    tmp_path.chmod(0o755)
    closed.chmod(0)
    command = [sys.executable, "-c", AS_NOBODY, "in"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    closed.chmod(0o755)
    assert run.stdout.startswith("UnavailableError in/closed: expected a folder or file that can be listed")
    assert "Permission denied: ask for access, or name the files to read" in run.stdout
    assert UnavailableError.exit_code == 5


def test_files_of_other_endings_are_named_and_compressed_ones_too(tmp_path):
    others = ["b.jsonl.zst", "c.json.gz", "e.txt", "f.bz2", "g/h.PARQUET", "i.jsonl.xz", "j.ds"]
    made(tmp_path, "a.jsonl", "D.JSONL", *others, "notes.md", "k.csv.gz", "l.idx", "m.ds.index", ".n.txt")
    found = listed(Look(tmp_path), ".jsonl")
    assert names_of(found.files, tmp_path) == ["D.JSONL", "a.jsonl"]
    assert names_of(found.left_out, tmp_path) == others
    assert left_out_in_words(found.left_out) == f"7 files are left out, the first is {tmp_path}/b.jsonl.zst"
    assert left_out_in_words(found.left_out[:1]) == f"1 file is left out: {tmp_path}/b.jsonl.zst"
    assert left_out_in_words(()) == ""
    assert files_left_out(Look(tmp_path), found.files) == [*found.left_out]


def test_a_json_beside_ids_has_facts_about_them_and_beside_json_lines_perhaps_documents(tmp_path):
    made(tmp_path, "a.npy", "b.jsonl", "facts.json")
    assert names_of(listed(Look(tmp_path), ".npy").left_out, tmp_path) == ["b.jsonl"]
    assert names_of(listed(Look(tmp_path), ".jsonl").left_out, tmp_path) == ["a.npy", "facts.json"]


def test_a_store_below_a_folder_is_left_out_as_one(tmp_path):
    made(tmp_path, "a.h5", f"store/{INDEX_NAME}", "store/shard-00000.h5", "store/more/b.h5")
    found = listed(Look(tmp_path), ".h5")
    assert names_of(found.files, tmp_path) == ["a.h5"]
    assert names_of(found.left_out, tmp_path) == [f"store/{INDEX_NAME}"]
    inside = listed(Look(tmp_path / "store"), ".h5")
    assert (names_of(inside.files, tmp_path), inside.left_out) == (["store/shard-00000.h5"], ())
    assert files_left_out(Look(tmp_path), inside.files) == files_left_out(Look(tmp_path / "store"), []) == []


def test_a_file_stands_for_itself_and_a_url_is_not_listed(tmp_path):
    path = made(tmp_path, "notes.md") / "notes.md"
    found = listed(Look(str(path)), ".npy")
    assert (found.path, found.files, found.left_out) == (path, (path,), ())
    assert [str(file) for file in listed(Look(any_path("s3://bucket/a.npy")), ".npy").files] == ["s3://bucket/a.npy"]
    assert listed(Look(any_path("s3://bucket/folder")), ".npy").files == ()
    with pytest.raises(NotFoundError, match="no such file or folder"):
        listed(Look(tmp_path / "nothing"), ".npy")


def test_several_paths_stand_for_the_files_of_all_and_each_is_named_once(tmp_path):
    made(tmp_path, "a/0.npy", "b/1.NPY", "c/x.txt")
    assert names_of(files_at(map(Look, [tmp_path / "b", tmp_path / "a"]), ".npy"), tmp_path) == ["b/1.NPY", "a/0.npy"]
    for paths in ([tmp_path, tmp_path / "a"], [tmp_path / "a" / "0.npy"] * 2):
        with pytest.raises(ConvertError, match="is named 2 times"):
            files_at(map(Look, paths), ".npy")
    with pytest.raises(ConvertError, match=r"c: no \.npy files in this folder, nor below it"):
        files_at([Look(tmp_path / "c")], ".npy")


def test_all_who_have_a_look_at_a_folder_see_the_same_files(tmp_path):
    made(tmp_path, "a.npy")
    look = Look(tmp_path)
    first = listed(look, ".npy")
    made(tmp_path, "b.npy", "c.h5")
    assert listed(look, ".npy") == first
    assert listed(look, ".h5").files == ()
    assert read(tmp_path, ".npy") == ["a.npy", "b.npy"]
    assert names_of(listed(pickle.loads(pickle.dumps(look)), ".npy").files, tmp_path) == ["a.npy", "b.npy"]


def test_an_ending_that_a_folder_lacks_is_known_by_its_listing(tmp_path):
    made(tmp_path, "a.ds", "b/c.DS.LOSS", "d/.e.index", "old.partial/f.idx", "store/shards.json", "store/g.loss2")
    look = Look(tmp_path)
    told = [name for name in (".ds", ".ds.loss", ".index", ".idx", ".loss2") if may_have(look, name)]
    assert told == [".ds", ".ds.loss"]
    (tmp_path / "a.ds.loss2").mkdir()  # its open raises the error
    assert not may_have(look, ".loss2")
    assert may_have(Look(tmp_path), ".loss2")


def test_the_folders_in_a_folder_and_its_own_files_are_those_of_its_listing(tmp_path):
    made(tmp_path, "b.npy", "a", "s/shards.json", "x/y/0.npy", ".git/0.npy", "t.partial/0.npy", ".hidden")
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").symlink_to(made(tmp_path.parent / f"{tmp_path.name}-else", "1.npy"))
    assert names_of(folders_in(Look(tmp_path)), tmp_path) == ["linked", "s", "x"]
    assert names_of(own_files(Look(tmp_path)), tmp_path) == ["a", "b.npy"]


@pytest.mark.parametrize("look_at", [verify_store, describe, lambda path: write_digests(path, f"{path}.json")])
def test_a_folder_is_listed_once_for_all_formats(look_at, tmp_path, monkeypatch):
    folder, found = tmp_path / "ids", []
    folder.mkdir()
    for number in range(2):
        np.save(folder / f"{number}.npy", np.arange(9))
    monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: found.append(str(path)) or scan(path))
    look_at(folder)
    assert found == [str(folder)]


@pytest.mark.parametrize("kind", ["npy", "jsonl", "parquet"])
def test_a_conversion_lists_the_folder_of_its_source_once(kind, tmp_path, monkeypatch):
    folder, found = tmp_path / "source", []
    folder.mkdir()
    for number in range(2):
        path = folder / f"{number}.{kind}"
        if kind == "npy":
            np.save(path, np.arange(9, dtype=np.uint16))
        elif kind == "jsonl":
            path.write_text('{"text": "some text"}\n')
        else:
            pq.write_table(pa.table({"input_ids": [[1, 2, 3]]}), path)
    (folder / "other.h5").touch()
    monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: found.append(str(path)) or scan(path))
    options = {"tokenizer": "byte"} if kind == "jsonl" else {}
    shape = {"batch_size": 1, "seq_len": 3}
    report = convert(folder, "hdf5", tmp_path / "out", workers=1, **shape, **options)
    assert report.left_out == (folder / "other.h5",)
    assert found.count(str(folder)) == 1


@pytest.mark.parametrize("ending", ["npy", "jsonl", "parquet"])
def test_a_conversion_lists_each_of_several_folders_once(ending, tmp_path, monkeypatch):
    folders, found = [tmp_path / "a", tmp_path / "b"], []
    for folder in folders:
        folder.mkdir()
        if ending == "npy":
            np.save(folder / "0.npy", np.arange(9, dtype=np.uint16))
        elif ending == "jsonl":
            (folder / "0.jsonl").write_text('{"text": "some text"}\n')
        else:
            pq.write_table(pa.table({"input_ids": [[1, 2, 3]]}), folder / "0.parquet")
        (folder / "other.h5").touch()
    monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: found.append(str(path)) or scan(path))
    options = {"tokenizer": "byte"} if ending == "jsonl" else {}
    report = convert(folders, "hdf5", tmp_path / "out", workers=1, batch_size=1, seq_len=3, **options)
    assert report.left_out == tuple(folder / "other.h5" for folder in folders)
    assert [found.count(str(folder)) for folder in folders] == [1, 1]


@pytest.mark.parametrize("open_path", [open_reader, Loader])
def test_a_folder_that_is_compared_when_it_is_opened_is_listed_once(open_path, tmp_path, monkeypatch):
    folder, digests, found = tmp_path / "ids", tmp_path / "ids.json", []
    folder.mkdir()
    for number in range(2):
        np.save(folder / f"{number}.npy", np.arange(9, dtype=np.uint16))
    write_digests(folder, digests)
    monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: found.append(str(path)) or scan(path))
    open_path(folder, batch_size=1, seq_len=3, verify="store", read_as=ReadAs(digests=digests)).close()
    assert found == [str(folder)]


def test_the_endings_of_every_format_are_known():
    """A file of a format that is read is never left out without a word."""
    endings = {each for row in FORMATS.values() for each in row.file_suffixes if each.startswith(".")}
    endings |= {suffix for kind in FILE_KINDS.values() for suffix in kind.suffixes}
    plain = {suffix for suffix in endings if suffix.count(".") == 1 and suffix != ".json"}
    assert plain <= SUFFIXES_OF_TOKENS
    assert {Path(suffix).stem for suffix in endings - plain - {".json"}} <= {*SUFFIXES_OF_TOKENS, ".json"}
