"""A new format is one file and one row: this file is the one file, and has two of the rows.

No other file names the two formats below, and the whole project must serve them.
"""

import json
import os
import struct
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commandline import report_of, run_zb, succeed
from contents import batches_of
from contract import check_closing, check_reader, check_writer, is_refused, random_tokens
from damage import flip_token
from interrupted import Failing, Stops

from zb_hdf5 import Corpus, FormatError, IncompleteError, Loader, ShardIndex, StoreMeta, open_reader, open_writer
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.arguments import convert
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.files.checked import Crc32Rows
from zb_hdf5.files.paths import regular
from zb_hdf5.files.publishing import write_atomically, write_fully
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.tokens import open_extents
from zb_hdf5.formats.batch_writer import FileWriter
from zb_hdf5.formats.broken_file import BrokenFile
from zb_hdf5.formats.format import Format
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.formats.native import read_any_crc32_file, sidecar_rows
from zb_hdf5.spec import crc32_path
from zb_hdf5.store.format_list import FORMATS

MAGICS = {"raw": b"RAWSLOTS", "tail": b"TAILSLOT"}
RAW_MAGIC = MAGICS["raw"]
TAIL_MAGIC = MAGICS["tail"]
HEADER = struct.Struct("<8s Q I I I I Q")
SLOTS = 64


def read_header(path, magic):
    with open(path, "rb", opener=regular) as file:
        found = file.read(HEADER.size)
    if len(found) < HEADER.size:
        raise IncompleteError(f"{path}: expected a header of {HEADER.size} bytes, found {len(found)}")
    found_magic, num_batches, batch_size, seq_len, item_bytes, seed, records = HEADER.unpack(found)
    if found_magic != magic:
        raise FormatError(f"{path}: expected magic {magic!r}, found {found_magic!r}")
    return StoreMeta(batch_size, seq_len, np.dtype(f"<u{item_bytes}"), seed, records), num_batches


class RawCorpus(Corpus):
    backend = "raw"
    row_bytes = 0  # of what lies behind the slots, for each batch
    end_bytes = 0

    def __init__(self, path, *, access="auto", identity=None):
        path = Path(path)
        meta, num_batches = read_header(path, MAGICS[self.backend])
        expected = SLOTS + num_batches * (meta.batch_bytes + self.row_bytes) + self.end_bytes
        if path.stat().st_size != expected:
            raise IncompleteError(f"{path}: expected {expected:,} bytes, found {path.stat().st_size:,}")
        extents = Extents([Run(SLOTS, meta.batch_bytes, num_batches)], meta.batch_bytes)
        tokens = open_extents(path, extents, meta.dtype, num_batches * meta.batch_tokens, access, identity)
        super().__init__(path, meta, tokens)
        self.extents = extents
        self._find_digests()

    def _find_digests(self):
        pass

    def crc32_rows(self):
        return sidecar_rows(self.path, self.num_units) if crc32_path(self.path).exists() else None


class TailCorpus(RawCorpus):
    backend = "tail"
    row_bytes, end_bytes = 4, 64

    def _find_digests(self):
        self.sha256 = self._tail()[-64:].decode()

    def crc32_rows(self):
        return Crc32Rows(partial(np.frombuffer, self._tail()[:-64], "<u4"))

    def _tail(self):
        with open(self.path, "rb") as file:
            file.seek(SLOTS + self.num_units * self.meta.batch_bytes)
            return file.read()


class RawWriter(FileWriter):
    backend = "raw"

    def _begin(self):
        pass

    def _append(self, batches, fields):
        write_fully(self._file.fd, batches, SLOTS + self.num_batches * self.meta.batch_bytes)

    def _complete(self, info):
        m = self.meta
        head = (info.num_batches, m.batch_size, m.seq_len, m.dtype.itemsize, m.seed, m.total_records)
        write_fully(self._file.fd, HEADER.pack(MAGICS[self.backend], *head).ljust(SLOTS, b"\0"), 0)
        return info

    def finish(self):
        info = super().finish()
        if self.backend == "raw":
            write_atomically(crc32_path(info.path), info.crc32.tobytes())
        return info


class TailWriter(RawWriter):
    backend = "tail"

    def _complete(self, info):
        tail = info.crc32.tobytes() + info.sha256.encode()
        write_fully(self._file.fd, tail, SLOTS + info.num_batches * self.meta.batch_bytes)
        return super()._complete(info)


def open_broken_raw(path):
    """Take the whole slots of a file that was cut short."""
    meta, announced = read_header(path, RAW_MAGIC)
    whole = min(announced, (path.stat().st_size - SLOTS) // meta.batch_bytes)
    extents = Extents([Run(SLOTS, meta.batch_bytes, whole)], meta.batch_bytes)
    tokens = open_extents(path, extents, meta.dtype, whole * meta.batch_tokens, "pread")
    corpus = Corpus(path, meta, tokens)
    reason = "" if whole == announced else f"it should have {announced} batches, and has {whole}"
    return BrokenFile(corpus, read_any_crc32_file(path), reason)


class RawFormat(Format):
    def open(self, file):
        return RawCorpus(file.path, access=file.access, identity=file.identity).with_verify(file.verify)

    def open_broken(self, path):
        return open_broken_raw(path)


class TailFormat(Format):
    def open(self, file):
        return TailCorpus(file.path, access=file.access, identity=file.identity).with_verify(file.verify)


def row_of(name, place, writer, **more):
    store = (f"a .{name} store", f"train-{name}")
    return FormatRow(
        name=name, noun=f".{name} files", suffixes=(f".{name}",), place=f"{__name__}:{place}",
        writer=f"{__name__}:{writer}", magic=f"{__name__}:{name.upper()}_MAGIC", file_noun=f"a .{name} file",
        as_source=store, as_target=store, takes_batches=True, holds_batches=True, holds_documents=False,
        tokens_only=True, **more,
    )  # fmt: skip


ROWS = [row_of("raw", "RawFormat", "RawWriter", has_sidecar=True), row_of("tail", "TailFormat", "TailWriter")]


NUM_BATCHES = 12
SHAPE = (4, 50)


@pytest.fixture(params=ROWS, ids=[row.name for row in ROWS])
def row(request, monkeypatch):
    """Add a row to the registry, as a program does that then imports the commands."""
    monkeypatch.setitem(FORMATS, request.param.name, request.param)
    monkeypatch.delitem(sys.modules, "zb_hdf5.converters.cli", raising=False)
    return request.param


@pytest.fixture
def expected():
    return random_tokens(NUM_BATCHES, *SHAPE, "uint16")


@pytest.fixture
def new_store(row, expected, tmp_path):
    """A store of three shards in the new format."""
    np.save(tmp_path / "tokens.npy", expected.reshape(-1, SHAPE[1]))
    shape = ("--batch-size", SHAPE[0], "--seq-len", SHAPE[1], "--no-shuffle", "--dtype", "uint16")
    source = tmp_path / "tokens.npy"
    how = ("--to", row.name, "--shards", 3, "--workers", 1)
    succeed(zb, "convert", source, tmp_path / "store", *shape, *how)
    return tmp_path / "store"


def verified(path, code=0):
    return report_of(zb, "verify", path, code=code)


def test_it_is_written_and_read_as_the_contract_says(row, tmp_path, write_file):
    batches = random_tokens(9, *SHAPE)  # as many as the contract writes

    def make(number):
        return open_writer(tmp_path / f"{number}{row.suffix}", batch_size=SHAPE[0], seq_len=SHAPE[1])

    def read_back(info):
        with open_reader(info.path) as reader:
            return batches_of(info.path), reader.corpus.digests.tokens_sha256()

    check_writer(make, read_back, batches)
    write_file(tmp_path / f"x{row.suffix}", batches)
    for access in ("auto", "mmap", "pread"):
        with open_reader(tmp_path / f"x{row.suffix}", backend=row.name, access=access) as reader:
            check_reader(reader, batches)


def test_a_store_is_described_and_found_good(row, new_store, expected):
    assert {shard.backend for shard in ShardIndex.load(new_store).shards} == {row.name}
    np.testing.assert_array_equal(batches_of(new_store), expected)
    np.testing.assert_array_equal(batches_of(new_store, verify="batch"), expected)
    info = json.loads(succeed(zb, "info", new_store, "--json").stdout)
    assert (info["backend"], info["num_batches"], info["splits"]["train"]["shards"]) == (row.name, NUM_BATCHES, 3)
    for lone in (new_store, next(new_store.glob(f"*{row.suffix}"))):
        assert row.name in succeed(zb, "info", lone).stdout
        assert verified(lone)["ok"]
        assert "problem:" not in succeed(zb, "doctor", lone).stdout
    assert (len(list(new_store.glob("*.crc32"))) == 3) == row.has_sidecar
    assert all({"crc32", "index"} <= {*file["checks"]} for file in verified(new_store)["files"])


@pytest.mark.parametrize("other", ["hdf5", "batch", "npy"])
@pytest.mark.thin
def test_it_is_converted_to_and_from(other, row, new_store, tmp_path, expected):
    there = tmp_path / f"there{FORMATS[other].suffix * (other == 'npy')}"
    back = tmp_path / "back"
    succeed(zb, "convert", new_store, there, "--to", other, "--workers", 1)
    if other == "npy":
        np.testing.assert_array_equal(np.load(there).reshape(expected.shape), expected)
        return
    assert FORMATS[other].suffix in {path.suffix for path in there.iterdir()}
    succeed(zb, "convert", there, back, "--to", row.name, "--workers", 1)
    assert verified(back)["ok"]
    before, after = ({p.name: p.read_bytes() for p in folder.glob("shard-*")} for folder in (new_store, back))
    assert before == after  # each byte of each shard, and of each sidecar
    succeed(zb, "convert", there, tmp_path / f"one{row.suffix}")
    np.testing.assert_array_equal(batches_of(tmp_path / f"one{row.suffix}"), expected)


def test_a_conversion_to_it_is_planned_and_resumed(row, new_store, tmp_path):
    succeed(zb, "convert", new_store, tmp_path / "h5", "--workers", 1)
    there = tmp_path / "there"
    planned = report_of(zb, "convert", tmp_path / "h5", there, "--to", row.name, "--dry-run")
    files = list(new_store.glob("shard-*"))
    assert planned["inodes"] == len(files) + 3
    is_refused(Stops, lambda: convert(StoreSource(tmp_path / "h5", "hdf5"), row.name, there, engine=Failing(2)))
    damaged, _ = sorted((tmp_path / "there.partial").glob(f"*{row.suffix}"))
    with open(damaged, "r+b") as file:
        file.truncate(100)
    done = succeed(zb, "convert", tmp_path / "h5", there, "--to", row.name, "--resume", "--workers", 1, "--json")
    report = json.loads(done.stdout)
    assert (report["shards_kept"], report["shards_written"]) == (1, 2)
    assert sorted(path.name for path in there.glob("shard-*")) == sorted(path.name for path in files)
    assert all((there / path.name).read_bytes() == path.read_bytes() for path in files)


def test_an_array_of_jobs_writes_it(row, new_store, tmp_path):
    succeed(zb, "convert", new_store, tmp_path / "h5", "--workers", 1)
    work = ("convert", tmp_path / "h5", tmp_path / "there", "--to", row.name, "--workers", 1)
    for part in ("0/2", "1/2"):
        succeed(zb, *work, "--shard-range", part)
    succeed(zb, "index", "merge", tmp_path / "there")
    assert verified(tmp_path / "there")["ok"]
    assert ShardIndex.load(tmp_path / "there").sha256 == ShardIndex.load(new_store).sha256


def test_damage_is_found_and_repaired(row, new_store, tmp_path, expected):
    shard = new_store / ShardIndex.load(new_store).shards[1].path
    flip_token(shard, 2)
    assert not verified(new_store, code=3)["ok"]
    run_zb("convert", new_store, tmp_path / "h5", code=3)
    succeed(zb, "repair", new_store)
    assert verified(new_store)["ok"]
    np.testing.assert_array_equal(batches_of(new_store), np.delete(expected, 4 + 2, axis=0))
    assert shard.with_name(f"{shard.stem}.repaired{row.suffix}").exists()


def test_a_file_that_was_cut_short_is_repaired_where_its_format_can(row, new_store, expected):
    shard = new_store / ShardIndex.load(new_store).shards[0].path
    with open_reader(shard) as reader:
        size = reader.corpus.extents.offset(2) + reader.meta.batch_bytes // 2
    os.truncate(shard, size)
    if row.name == "tail":
        assert "Error:" in run_zb("repair", shard, code=4).output
        return
    output = shard.with_name("saved" + row.suffix)
    succeed(zb, "repair", shard, "--output", output)
    np.testing.assert_array_equal(batches_of(output), expected[:2])


def test_a_lost_index_is_made_anew(row, new_store, expected):
    before = ShardIndex.load(new_store)
    (new_store / "shards.json").unlink()
    for sidecar in new_store.glob("*.crc32"):
        sidecar.unlink()
    succeed(zb, "index", "rebuild", new_store)
    assert ShardIndex.load(new_store).shards == before.shards
    assert verified(new_store)["ok"]
    np.testing.assert_array_equal(batches_of(new_store), expected)


def test_it_stands_beside_another_format_in_one_store(row, tmp_path, write_file, expected):
    store = tmp_path / "mixed"
    store.mkdir()
    write_file(store / f"shard-00000{row.suffix}", expected[:5])
    write_file(store / "shard-00001.h5", expected[5:])
    succeed(zb, "index", "rebuild", store)
    assert [shard.backend for shard in ShardIndex.load(store).shards] == [row.name, "hdf5"]
    np.testing.assert_array_equal(batches_of(store), expected)
    assert verified(store)["ok"]
    assert "problem:" not in succeed(zb, "doctor", store).stdout
    with open_reader(store / f"shard-00000{row.suffix}") as reader:
        check_closing(reader, expected[:5])


def test_the_crc32_file_of_a_lone_file_is_made_where_its_format_needs_one(row, tmp_path, write_file, expected):
    path = tmp_path / f"x{row.suffix}"
    write_file(path, expected)
    run_zb("index", "crc32", path, code=0 if row.has_sidecar else 1)
    assert verified(path)["ok"]


def test_training_goes_on_from_it_and_from_another_format(row, new_store, tmp_path):
    succeed(zb, "convert", new_store, tmp_path / "h5", "--workers", 1)
    how = {"shuffle": "records", "seed": 3, "rank": 0, "world_size": 1}
    with Loader(tmp_path / "h5", **how) as whole:
        expected = [batch.numpy() for batch in whole]
    with Loader(new_store, backend=row.name, **how) as first:
        steps = iter(first)
        begun = [next(steps).numpy() for _ in range(5)]
        state = json.loads(json.dumps(first.state_dict()))
    (tmp_path / "state.json").write_text(json.dumps(state))
    for path in (new_store, tmp_path / "h5"):
        with Loader(path, **how) as second:
            second.load_state_dict(state)
            rest = [batch.numpy() for batch in second]
        np.testing.assert_array_equal(begun + rest, expected)
    which = succeed(zb, "which", new_store, "--state", tmp_path / "state.json", "--step", 0, "--world-size", 1)
    assert row.suffix in which.stdout


def test_a_file_of_no_format_is_refused_with_the_names_of_all(row, tmp_path):
    (tmp_path / "x.dat").write_bytes(b"\0\xffnothing that anybody knows, and no text")
    is_refused(FormatError, lambda: open_reader(tmp_path / "x.dat"), match=rf"expected .*{row.file_noun} \(magic")
