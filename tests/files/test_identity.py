"""The identity of files: a file that took the place of another is named, also one of the same size and time."""

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from contents import take_place
from contract import is_refused
from golden import DATA
from processes import environment
from reading import reading

from zb_hdf5 import FormatError, ZbError, open_corpus, open_writer, write_digests
from zb_hdf5.files.identity import GROWING, Device, FileIdentity
from zb_hdf5.files.known_files import FEW, KnownFiles

WRITTEN = DATA / "trainers"
CHANGED = r"changed since it was opened: expected \(device, inode\)"


def make_ids(folder):
    folder.mkdir()
    for number in range(3):
        np.save(folder / f"{number}.npy", np.arange(1000, dtype=np.uint16) + number)
    return [folder / f"{number}.npy" for number in range(3)]


def make_datasets(folder):
    folder.mkdir()
    for number in range(3):
        with h5py.File(folder / f"{number}.h5", "w") as h5:
            h5["tokens"] = np.arange(1000, dtype=np.uint16) + number
    return [folder / f"{number}.h5" for number in range(3)]


def make_megatron(folder):
    shutil.copytree(WRITTEN / "megatron/uint16", folder, ignore=shutil.ignore_patterns("truth.json"))
    for file in sorted(folder.iterdir()):
        shutil.copyfile(file, folder / f"y-{file.name}")
        shutil.copyfile(file, folder / f"z-{file.name}")
    return sorted(folder.glob("*.bin"))


def last_tokens(corpus):
    """Return the last tokens of a corpus, whose file nobody has read yet; or the words of the error."""
    try:
        return corpus.tokens[corpus.num_tokens - 10 : corpus.num_tokens].tolist()
    except ZbError as error:
        return str(error)


@pytest.mark.parametrize("make", [make_ids, make_datasets, make_megatron])
def test_a_file_of_the_same_size_and_time_that_took_the_place_of_another_is_named(make, tmp_path):
    files = make(tmp_path / "ids")
    with open_corpus(tmp_path / "ids") as corpus:
        first = corpus.tokens[0:10].tolist()
        sent = pickle.dumps(corpus)
        take_place(files[0])
        take_place(files[-1])
        assert corpus.tokens[0:10].tolist() == first  # that file is open
        is_refused(FormatError, lambda: corpus.tokens[corpus.num_tokens - 10 :], match=CHANGED)
        with pickle.loads(sent) as copy:
            is_refused(FormatError, lambda: copy.tokens[0:10], match=CHANGED)
            is_refused(FormatError, lambda: copy.tokens[copy.num_tokens - 10 :], match=CHANGED)
    with open_corpus(tmp_path / "ids") as again:
        assert again.tokens[0:10].tolist() == first


@pytest.mark.parametrize("name", ["x.h5", "x.batch"])
def test_a_copy_of_a_corpus_of_one_file_refuses_another_file(name, tmp_path):
    with open_writer(tmp_path / name, batch_size=2, seq_len=8) as writer:
        writer.write(np.arange(64, dtype=np.uint32).reshape(4, 2, 8))
    with open_corpus(tmp_path / name) as corpus:
        sent = pickle.dumps(corpus)
        take_place(tmp_path / name)
        assert last_tokens(corpus) == list(range(54, 64))
    is_refused(FormatError, lambda: pickle.loads(sent), match=CHANGED)  # which opens it


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_refuses_a_file_that_took_the_place_of_another(method, tmp_path):
    files = make_ids(tmp_path / "ids")
    with open_corpus(tmp_path / "ids") as corpus:
        _ = corpus.tokens[0:10]
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(last_tokens, [corpus]) == list(range(992, 1002))
            take_place(files[-1])
            assert "changed since it was opened: expected (device, inode)" in pool.apply(last_tokens, [corpus])


def test_the_same_file_by_another_link_is_read(tmp_path):
    files = make_ids(tmp_path / "ids")
    with open_corpus(tmp_path / "ids") as corpus:
        sent = pickle.dumps(corpus)
        for file in files:
            os.rename(file, tmp_path / "aside.npy")
            os.link(tmp_path / "aside.npy", file)
            os.unlink(tmp_path / "aside.npy")
        assert last_tokens(corpus) == last_tokens(pickle.loads(sent)) == list(range(992, 1002))


def test_a_bind_mount_that_is_mounted_again_is_read(tmp_path):
    make_ids(tmp_path / "ids")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    mount = ["mount", "--bind", tmp_path / "ids", mounted]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        with open_corpus(mounted) as corpus:
            sent = pickle.dumps(corpus)
        subprocess.run(["umount", mounted], check=True)
        subprocess.run(mount, check=True)
        assert last_tokens(pickle.loads(sent)) == list(range(992, 1002))
    finally:
        subprocess.run(["umount", mounted], check=True)


READS_A_COPY = """
import pickle, sys
with pickle.load(sys.stdin.buffer) as corpus:
    print(corpus.tokens[0:3].tolist(), corpus.tokens[2000:2003].tolist())
"""


def test_among_other_mounts_the_size_and_the_time_are_compared_alone(tmp_path):
    """On another host, and in another container, a file has another device or inode."""
    files = make_ids(tmp_path / "ids")
    with open_corpus(tmp_path / "ids") as corpus:
        sent = pickle.dumps(corpus)
    take_place(files[0])  # as the same path of another host has it
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("may not have mounts of its own")

    def read():
        program = ["unshare", "--mount", sys.executable, "-c", READS_A_COPY]
        return subprocess.run(program, input=sent, check=False, capture_output=True, env=environment())

    assert read().stdout == b"[0, 1, 2] [2, 3, 4]\n"
    os.utime(files[2], ns=(1, 1))
    done = read()
    assert (done.returncode, b"expected (size, mtime_ns)" in done.stderr) == (1, True)


DOCUMENTED = {
    "megatron/uint16": ("*.idx", {}),
    "datatrove/uint16": ("*.ds.index", {}),
    "olmo/uint16": ("*.csv.gz", {"source_dtype": "uint16"}),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_replaced_file_of_documents_is_named(name, tmp_path):
    pattern, options = DOCUMENTED[name]
    folder = Path(shutil.copytree(WRITTEN / name, tmp_path / "ids"))
    [documents] = folder.glob(pattern)
    with open_corpus(folder, **reading(options)) as corpus:
        sent = pickle.dumps(corpus)
        take_place(documents)
        is_refused(FormatError, lambda: corpus.doc_offsets, match=f"{documents.name}: {CHANGED}")
    with pickle.loads(sent) as copy:
        is_refused(FormatError, lambda: copy.doc_offsets, match=f"{documents.name}: {CHANGED}")
    with pickle.loads(sent) as copy:
        if documents.suffix == ".idx":  # without it nobody can tell that the ids follow each other
            is_refused(FormatError, lambda: copy.tokens[0:10], match=CHANGED)
        else:
            assert len(copy.tokens[0:10]) == 10


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 300])
def test_many_identities_are_pickled_in_few_bytes(count):
    mounts = [Device(2049, "here"), Device(2**63 + 1, "here"), Device(3, "elsewhere")]
    known, expected = KnownFiles(), {}
    for number in range(0, 3 * count, 3):
        device = mounts[number % 3 if number < 9 else 0]
        expected[number] = FileIdentity(number * 1000, (-1) ** number * 10**18 - number, 2**64 - 1 - number, device)
        known.note(number, expected[number])
        known.note_all({}, {number: FileIdentity(GROWING, GROWING, number, mounts[2]), number + 1: None})
    known.note(7 * count, (17, '"etag"'))  # of an object
    known.note(7 * count + 1, None)
    copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(known))))
    assert len(pickle.dumps(copy)) < 1500 + 40 * count
    for number in range(-2, 3 * count + 3):
        assert copy.get(number) == known.get(number)
        assert copy.documents(number) == known.documents(number)
        assert number < 0 or copy.get(number) == expected.get(number)
    assert (copy.get(7 * count), copy.get(7 * count + 1)) == ((17, '"etag"'), None)
    copy.note(0, expected[0]._replace(num_bytes=5))
    assert pickle.loads(pickle.dumps(copy)).get(0).num_bytes == 5


def test_a_time_that_no_int64_has_is_pickled(tmp_path):
    known = KnownFiles()
    times = [-(2**63), 2**63 - 1, 2**70]
    for number in range(3 * FEW):
        known.note(number, FileIdentity(1, times[number % 3], 2, Device(3, "here")))
    copy = pickle.loads(pickle.dumps(known))
    assert [copy.get(number) for number in range(3 * FEW)] == [known.get(number) for number in range(3 * FEW)]


def test_digests_and_caches_are_named_by_size_and_time_alone(tmp_path):
    """So those of earlier versions fit, and those that another host has made."""
    files = make_ids(tmp_path / "ids")
    write_digests(tmp_path / "ids", tmp_path / "digests.json")
    digests = (tmp_path / "digests.json").read_text()
    with open_writer(tmp_path / "x.batch", batch_size=2, seq_len=8) as writer:
        writer.write(np.arange(64, dtype=np.uint32).reshape(4, 2, 8))
    (tmp_path / "x.batch.crc32").unlink()  # then the files count
    for _ in range(2):
        with open_corpus(tmp_path / "x.batch", cache=tmp_path / "cache") as corpus:
            _ = corpus.tokens[0:10]
        assert len([*(tmp_path / "cache").iterdir()]) == 1
        take_place(tmp_path / "x.batch")
    take_place(files[0])
    write_digests(tmp_path / "ids", tmp_path / "digests.json", overwrite=True)
    assert (tmp_path / "digests.json").read_text() == digests
