"""Rows are taken from a mapping where their pages are in memory, else they are announced and read by position.

The page cache is simulated: each test sets which pages are there, and which faults wait. Reads and announcements
are counted. The last test has a real control group.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from contents import write_stream
from reading import begun

from benchmarks import measure as m
from benchmarks import memory_cap
from zb_hdf5 import DocumentLoader, Loader, MixedLoader, convert, open_corpus, open_reader
from zb_hdf5.files import pages as file_pages
from zb_hdf5.files import residency
from zb_hdf5.files.direct_reads import DirectReads
from zb_hdf5.files.file_systems import in_memory
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.files.residency import READS_UNTIL_LOOK, SURROUNDINGS, WATCHED_ONE_IN, Residency

ALONE = {"rank": 0, "world_size": 1}
NUM_ROWS = 1200
ROW = 256
TOKENS = np.random.default_rng(11).integers(0, 60_000, (NUM_ROWS, ROW), dtype=np.uint32)
CAP = 96 << 20


class Pages:
    """The answers and acts of the kernel."""

    def __init__(self, monkeypatch):
        self.in_memory = True
        self.faults = 0
        self.reads = []
        self.announced = []
        self.past_cache = []
        real_begin = DirectReads.begin
        real_read = LocalFile.read_ranges
        real_advise = os.posix_fadvise

        def read_ranges(file, ranges):
            ranges = list(ranges)
            self.reads.extend((file.name, offset, out.nbytes) for offset, out in ranges)
            real_read(file, ranges)

        def advise(fd, offset, num_bytes, advice):
            if advice == os.POSIX_FADV_WILLNEED:
                self.announced.append((os.path.realpath(f"/proc/self/fd/{fd}"), offset, num_bytes))
            real_advise(fd, offset, num_bytes, advice)

        def begin(reads, wanted):
            self.past_cache.extend(wanted)
            real_begin(reads, wanted)

        monkeypatch.setattr(LocalFile, "read_ranges", read_ranges)
        monkeypatch.setattr(DirectReads, "begin", begin)
        monkeypatch.setattr(os, "posix_fadvise", advise)
        for module in (file_pages, residency):
            monkeypatch.setattr(module, "page_in_memory", lambda fd, offset: self.in_memory)
        monkeypatch.setattr(residency, "major_faults", lambda: self.faults)
        monkeypatch.setattr(residency, "memory_limit", lambda: 0)  # surroundings are left alone

    def clear(self):
        self.reads.clear()
        self.announced.clear()
        self.past_cache.clear()


@pytest.fixture
def pages(monkeypatch):
    return Pages(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same tokens in every kind of file."""
    folder = tmp_path_factory.mktemp("kinds")
    np.save(folder / "rows.npy", TOKENS)
    np.save(folder / "flat.npy", TOKENS.reshape(-1))
    for number in range(3):
        (folder / "parts").mkdir(exist_ok=True)
        np.save(folder / "parts" / f"part{number}.npy", TOKENS[400 * number : 400 * (number + 1)].reshape(-1))
    with h5py.File(folder / "foreign.h5", "w") as h5:
        h5["input_ids"] = TOKENS.astype(np.int64)
        h5["loss_mask"] = (TOKENS % 3 > 0).astype(np.uint8)
    shape = {"batch_size": 8, "seq_len": ROW, "dtype": "uint32", "shuffle": False}
    convert(folder / "rows.npy", "hdf5", folder / "store", **shape)
    convert(folder / "rows.npy", "hdf5", folder / "shards", shards=5, **shape)
    convert(folder / "rows.npy", "batch", folder / "batches", **shape)
    write_stream(folder / "stream.h5", TOKENS.reshape(-1)[:252_000], [700] * 360, dtype="uint32")
    return folder


WINDOWS = {"batch_size": 8, "seq_len": 2 * ROW}
KINDS = {
    "store": ("store", {}),
    "shards": ("shards", {}),
    ".batch": ("batches", {}),
    ".npy": ("flat.npy", WINDOWS),
    "files": ("parts", WINDOWS),
    "overlapping windows": ("flat.npy", {**WINDOWS, "targets": True}),
    "stream": ("stream.h5", WINDOWS),
    "foreign": ("foreign.h5", {"batch_size": 8}),
    "fields": ("foreign.h5", {"batch_size": 8, "fields": ("loss_mask",)}),
    "checked": ("store", {"verify": "batch"}),
    "shorter rows": ("store", {"seq_len": ROW // 2}),
}


def values(batch):
    if isinstance(batch, dict):
        return [part.numpy() for part in batch.values() if isinstance(part, torch.Tensor)]
    return [part.numpy() for part in (batch if isinstance(batch, tuple) else (batch,))]


def epoch_of(loader, epoch):
    loader.set_epoch(epoch)
    return [values(batch) for batch in loader]


def are_equal(steps, others):
    assert len(steps) == len(others) > 0
    return all(
        np.array_equal(a, b)
        for step, other in zip(steps, others, strict=True)
        for a, b in zip(step, other, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", ["records", "global"])
def test_what_is_not_in_memory_gives_the_same_steps_in_each_epoch(kind, shuffle, folder, pages):
    path, options = KINDS[kind]
    with Loader(folder / path, shuffle=shuffle, **options, **ALONE) as loader:
        warm = [epoch_of(loader, epoch) for epoch in (0, 1)]
        pages.clear()
        pages.in_memory = False
        for epoch in (0, 1):  # the pages in memory are lost
            pages.faults += 1
            assert are_equal(epoch_of(loader, epoch), warm[epoch])
        assert pages.announced or pages.past_cache
        pages.in_memory = True
        assert are_equal(epoch_of(loader, 0), warm[0])
        pages.clear()
        assert are_equal(epoch_of(loader, 1), warm[1])
        assert not pages.announced
        assert not pages.past_cache


@pytest.mark.parametrize("kind", ["store", "shards", ".batch", ".npy", "files", "stream", "foreign", "fields"])
def test_each_row_is_announced_once_and_nothing_else(kind, folder, pages):
    path, options = KINDS[kind]
    pages.in_memory = False
    with Loader(folder / path, shuffle="records", **options, **ALONE) as loader:
        next(iter(loader))
        pages.clear()
        steps = epoch_of(loader, 0)
        rows = Counter(pages.announced)
        reads = {read for read in pages.reads if read in rows}
        assert len(rows) == sum(rows.values()), "no row twice"
        wanted = sum(len(step[0]) for step in steps) * (2 if kind == "fields" else 1)
        crossing = 8 if kind in ("files", "shards") else 0  # a row in two files is announced in both
        assert wanted <= len(rows) <= wanted + crossing
        assert len(reads) > 0.9 * wanted, "rows of which few follow each other are read one by one, as announced"


@pytest.mark.parametrize("kind", ["store", "shards", ".batch", ".npy", "foreign"])
def test_rows_in_memory_are_taken_from_the_mapping(kind, folder, pages):
    path, options = KINDS[kind]
    with Loader(folder / path, shuffle="records", **options, **ALONE) as loader:
        epoch_of(loader, 0)
        pages.clear()
        epoch_of(loader, 1)
        assert not pages.reads
        assert not pages.announced
        steps = loader.dataset()
        for number in range(3):
            _ = steps[number]
        assert not pages.reads


@pytest.mark.parametrize("shuffle", ["records", "global"])
def test_values_that_are_not_in_memory_are_announced_although_the_tokens_are(folder, pages, shuffle, monkeypatch):
    options = {"batch_size": 8, "fields": ("loss_mask",), "shuffle": shuffle, **ALONE}
    with open_corpus(folder / "foreign.h5") as corpus:
        with Loader(corpus, **options) as loader:
            warm = [values(step) for step in loader]
        field = corpus.field("loss_mask").tokens
        monkeypatch.setattr(type(field.pages), "ready", lambda found, start: found is not field.pages)
        field.pages.residency.in_memory = False
        pages.clear()
        with Loader(corpus, **options) as loader:
            steps = iter(loader)
            first = values(next(steps))
            assert sum(num_bytes for _, _, num_bytes in pages.announced) >= 10 * first[1].nbytes, "those of later steps"
            assert are_equal([first, *map(values, steps)], warm)


@pytest.mark.parametrize("kind", ["store", "shards"])
def test_a_mapped_read_that_waits_ends_the_mapping_in_the_same_block(kind, folder, pages, monkeypatch):
    with begun(Loader(folder / kind, shuffle="records", **ALONE), 3) as loader:
        dataset = loader.dataset()
        expected = [values(dataset[number]) for number in range(len(dataset))]
        pages.clear()
        steps = iter(loader)
        found = [values(next(steps)) for _ in range(3)]
        pages.in_memory = False
        monkeypatch.setattr(residency, "major_faults", iter(range(10**6)).__next__)  # each read waits
        found += [values(next(steps)) for _ in range(WATCHED_ONE_IN)]
        found += [values(next(steps)) for _ in range(2)]
        assert pages.reads
        assert are_equal(found + [values(step) for step in steps], expected)


def test_single_reads_follow_what_happens_too(folder, pages, monkeypatch):
    with open_reader(folder / "store") as reader:
        rows = np.array([3, 900, 41])
        out = np.empty((3, ROW), np.uint32)

        def read():
            pages.clear()
            reader.read_records_into(rows, out)
            np.testing.assert_array_equal(out, TOKENS[rows])
            return len(pages.announced), len(pages.reads)

        reader.read_batch_torch(0)  # which opens the file
        pages.in_memory = False
        assert read() == (3, 3)
        pages.in_memory = True
        assert [read() for _ in range(READS_UNTIL_LOOK)] == [(3, 3)] * READS_UNTIL_LOOK
        assert read() == (0, 0)  # after a look
        pages.in_memory = False  # nobody looks again; a fault tells
        assert read() == (0, 0)
        monkeypatch.setattr(residency, "major_faults", iter(range(10**6)).__next__)
        assert [read() for _ in range(WATCHED_ONE_IN)][-1] == (3, 3)


@pytest.mark.parametrize("way", ["pad", "pack"])
def test_documents_that_are_not_in_memory_are_announced_and_the_same(way, folder, pages):
    how = {"pad": {"batch_size": 4}, "pack": {"max_tokens": 2100}}[way]
    with DocumentLoader(folder / "stream.h5", collate=way, **how, **ALONE) as loader:
        warm = [epoch_of(loader, epoch) for epoch in (0, 1)]
        pages.clear()
        loader.set_epoch(0)
        assert are_equal([values(batch) for batch in loader], warm[0])
        assert not pages.announced
        pages.in_memory = False
        loader.corpus.tokens.pages.residency.found(False)
        assert are_equal(epoch_of(loader, 1), warm[1])
        assert len(pages.announced) == len(set(pages.announced)) > 300


@pytest.mark.parametrize("shuffle", ["records", "global"])
def test_a_mixture_announces_what_is_not_in_memory(shuffle, folder, pages):
    def steps():
        with MixedLoader(sources, {"a": 1, "b": 2}, shuffle=shuffle, **ALONE) as loader:
            return [values(batch) for _, batch in zip(range(300), loader, strict=False)]

    sources = {"a": folder / "store", "b": folder / "batches"}
    warm = steps()
    pages.clear()
    assert are_equal(steps(), warm)
    assert not pages.announced
    pages.in_memory = False
    assert are_equal(steps(), warm)
    assert len({path for path, _, _ in pages.announced}) == 2


def test_surroundings_are_read_where_memory_holds_the_data(folder, pages, monkeypatch):
    monkeypatch.setattr(residency, "memory_limit", lambda: 1 << 40)
    pages.in_memory = False
    with Loader(folder / "store", shuffle="records", **ALONE) as loader:
        epoch_of(loader, 0)
    assert all(offset % SURROUNDINGS == 0 and size % SURROUNDINGS == 0 for _, offset, size in pages.announced)


def test_surroundings_end_when_earlier_pages_are_lost(tmp_path, pages, monkeypatch):
    monkeypatch.setattr(residency, "memory_limit", lambda: 1 << 40)
    path = tmp_path / "file"
    path.write_bytes(b"x")
    file = LocalFile(path)
    kept = Residency(1)
    for number in range(100_000):
        kept.announced(file, number)
    assert kept.surroundings == SURROUNDINGS
    pages.in_memory = False
    for number in range(20_000):
        kept.announced(file, number)
    assert kept.surroundings == 1
    kept.found(True)  # all of it is in memory again
    assert kept.surroundings == SURROUNDINGS
    file.close()


def test_a_copy_in_another_process_looks_for_itself(folder, pages):
    import pickle

    with Loader(folder / "shards", shuffle="records", **ALONE) as loader:
        expected = epoch_of(loader, 0)
        copy = pickle.loads(pickle.dumps(loader.dataset()))
        assert are_equal([values(copy[number]) for number in range(len(copy))], expected)


COLD = """
import json, os, resource, sys
from pathlib import Path
path, entrance, how = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
import torch
from zb_hdf5 import Loader
Path(entrance).write_text(str(os.getpid()))
loader = Loader(path, rank=0, world_size=1, **how)
steps, counts = 0, []
for epoch in (0, 1):
    loader.set_epoch(epoch)
    before = resource.getrusage(resource.RUSAGE_SELF)
    rows = 0
    for batch in loader:
        rows += len(batch)
        if rows >= 20_000:
            break
    after = resource.getrusage(resource.RUSAGE_SELF)
    counts.append((rows, after.ru_majflt - before.ru_majflt, 512 * (after.ru_inblock - before.ru_inblock)))
print(json.dumps(counts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["store", "stream"])
def test_rows_of_data_larger_than_memory_cost_a_page_each(kind, tmp_path):
    """384 MiB in a control group of 96: a fault for each row would read ahead, up to megabytes."""
    if in_memory(tmp_path):
        pytest.skip("the temporary folder is in memory")
    try:
        place = memory_cap.usable_place(CAP)
    except memory_cap.NoCapError as error:
        pytest.skip(str(error))
    seq_len = 512
    rows = np.arange(4 * CAP // 4 // seq_len, dtype=np.uint32)
    path = tmp_path / "flat.npy"
    np.save(path, np.repeat(rows, seq_len))
    how = {"shuffle": "records", "batch_size": 32, "seq_len": seq_len}
    if kind == "store":
        np.save(path, np.load(path).reshape(-1, seq_len))
        convert(path, "hdf5", tmp_path / "store", batch_size=32, seq_len=seq_len, dtype="uint32")
        path = tmp_path / "store"
    m.evict(tmp_path)
    with memory_cap.group(place, CAP + (256 << 20)) as group:  # the process itself needs some of it
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", COLD, str(path), str(group.entrance), json.dumps(how)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr
    for rows_read, faults, num_bytes in json.loads(done.stdout):
        assert faults < 200
        assert num_bytes < 3 * rows_read * 4096 + (16 << 20)
