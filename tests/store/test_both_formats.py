"""Upkeep of a folder that has a store of the same tokens for each format."""

import pytest
from commandline import one_error, report_of, run_zb
from contents import files_in, write_books
from contract import is_refused, random_tokens
from damage import flip_token

from zb_hdf5 import ArgumentError, Loader, ShardIndex, open_reader, rebuild_index, repair, verify_store
from zb_hdf5.commands.zb import zb

ALONE = {"rank": 0, "world_size": 1}
SHARDS = ["batch/shard-00000.batch", "batch/shard-00001.batch", "hdf5/shard-00000.h5", "hdf5/shard-00001.h5"]


@pytest.fixture
def books(tmp_path, write_store):
    return write_books(tmp_path / "books", random_tokens(6, 4, 64), write_store)


def outcomes(report, folder):
    return {file["path"].removeprefix(f"{folder}/"): file["outcome"] for file in report["files"]}


def test_verify_checks_both_and_counts_all_tokens(books):
    seen, totals = [], []
    reports = verify_store(books, progress=seen.append, announce=totals.append)
    assert [report.path.removeprefix(f"{books}/") for report in reports] == SHARDS
    assert (totals, sum(seen)) == ([2 * 6 * 4 * 64], 2 * 6 * 4 * 64)
    found = report_of(zb, "verify", books)
    assert (found["ok"], outcomes(found, books)) == (True, dict.fromkeys(SHARDS, "verified"))
    with Loader(books, verify="store", **ALONE) as loader:
        assert loader.batches.path == books / "hdf5"


@pytest.mark.parametrize(("name", "suffix"), [("batch", "batch"), ("hdf5", "h5")])
def test_verify_names_the_damage_in_either(name, suffix, books):
    flip_token(books / name / f"shard-00001.{suffix}", 0)
    found = report_of(zb, "verify", books, code=3)
    bad = f"{name}/shard-00001.{suffix}"
    assert outcomes(found, books) == {shard: "bad" if shard == bad else "verified" for shard in SHARDS}


def test_verify_finds_a_lost_index_and_checks_the_other_store(books):
    (books / "hdf5" / "shards.json").unlink()
    found = report_of(zb, "verify", books, code=3)
    assert outcomes(found, books) == {"hdf5": "bad"} | dict.fromkeys(SHARDS[:2], "verified")
    assert "its index was lost" in found["files"][0]["problem"]
    with open_reader(books) as reader:
        assert reader.path == books / "batch"


def test_verify_finds_that_they_have_other_tokens(books, write_store):
    (books / "batch").rename(books / "old")
    write_store(books / "batch", random_tokens(6, 4, 64) ^ 1, (4,), ("batch",))
    found = report_of(zb, "verify", books, code=3)
    assert outcomes(found, books) == {"hdf5": "bad"} | dict.fromkeys(SHARDS, "verified")
    [problem] = [file["problem"] for file in found["files"] if file["problem"]]
    assert "expected the same tokens in batch and hdf5" in problem


def test_a_split_is_checked_in_both(books):
    assert len(verify_store(books, split="train")) == 4
    is_refused(ArgumentError, lambda: verify_store(books, split="val"), match="expected a split")


@pytest.mark.parametrize("command", [("repair",), ("index", "rebuild")])
def test_what_changes_one_store_asks_for_its_path(command, books):
    (books / "hdf5" / "shards.json").unlink()
    before = files_in(books)
    for error in (one_error(run_zb(*command, books), 2), is_refused_of(command, books)):
        assert f"{books}: has a store for each format: {books / 'batch'} and {books / 'hdf5'}" in error
    assert files_in(books) == before
    rebuild_index(books / "hdf5")
    assert ShardIndex.load(books / "hdf5").token_count == ShardIndex.load(books / "batch").token_count
    assert {report.state for report in repair(books / "hdf5")} == {"whole"}


def is_refused_of(command, books):
    with pytest.raises(ArgumentError) as caught:
        (repair if command == ("repair",) else rebuild_index)(books)
    return str(caught.value)
