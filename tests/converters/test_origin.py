"""The origin of the tokens in a store: the padding, the files of a shard, the note of the user, and no date."""

import json
import os

import h5py
import numpy as np
import pytest
from commandline import report_of, run, succeed
from contents import files_in
from contract import is_refused

from zb_hdf5 import ArgumentError, ShardIndex, convert, rebuild_index
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert_commands as command

NOTE = "CC-BY-4.0, <b>crawl</b> of May"


@pytest.fixture
def texts(tmp_path):
    """Three files of documents of several lengths."""
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(paths):
        lines = [json.dumps({"text": f"{number} " * (5 + row)}) for row in range(20)]
        path.write_text("\n".join(lines))
    return paths


@pytest.fixture
def records(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(256, dtype="<u2").reshape(16, 16))
    return tmp_path / "in.npy"


def attributes(path):
    with h5py.File(path) as h5:
        return dict(h5.attrs)


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
@pytest.mark.parametrize(("given", "expected"), [(None, 256), (7, 7)])
@pytest.mark.thin
def test_packed_shards_name_the_id_of_their_padding(packing, given, expected, texts, tmp_path):
    how = {"tokenizer": "byte", "batch_size": 4, "seq_len": 16, "packing": packing, "pad_id": given, "workers": 1}
    convert(texts, "hdf5", tmp_path / "store", **how)
    index = ShardIndex.load(tmp_path / "store")
    assert index.source["pad_id"] == expected
    assert index.source["packing"] == packing
    for shard in index.shards:
        assert attributes(tmp_path / "store" / shard.path)["pad_id"] == expected
    assert rebuild_index(tmp_path / "store", force=True).source["pad_id"] == expected


def test_a_shard_of_a_stream_names_its_own_files_and_the_store_all_of_them(texts, tmp_path):
    for name, how, expected in (
        ("each", {}, [[path] for path in texts]),
        ("two", {"shards": 2}, None),
    ):
        convert(texts, "stream", tmp_path / name, tokenizer="byte", workers=1, **how)
        index = ShardIndex.load(tmp_path / name)
        assert index.source["files"] == [str(path) for path in texts]
        found = [json.loads(attributes(tmp_path / name / shard.path)["source"])["files"] for shard in index.shards]
        assert expected is None or found == [[str(path) for path in each] for each in expected]
        assert sorted({file for files in found for file in files}) == sorted(map(str, texts))
        (tmp_path / name / "shards.json").unlink()
        assert rebuild_index(tmp_path / name).source["files"] == [str(path) for path in texts]


def test_a_note_is_kept_shown_and_copied(records, tmp_path):
    shape = ("--batch-size", 4, "--seq-len", 16, "--note", NOTE, "--quiet")
    for name in ("store", "lone.h5"):
        succeed(command, "npy-to-hdf5", records, tmp_path / name, *shape)
        assert report_of(zb, "info", tmp_path / name)["source"]["note"] == NOTE
        assert NOTE in succeed(zb, "info", tmp_path / name).stdout
        succeed(zb, "report", tmp_path / name, "-o", tmp_path / f"{name}.html")
        page = (tmp_path / f"{name}.html").read_text()
        assert "&lt;b&gt;crawl&lt;/b&gt; of May" in page
    succeed(command, "npy-to-batch", records, tmp_path / "batch", *shape)
    assert ShardIndex.load(tmp_path / "batch").source["note"] == NOTE
    for name in ("store", "lone.h5"):
        convert(tmp_path / name, "hdf5", tmp_path / f"copy-{name}")
        assert report_of(zb, "info", tmp_path / f"copy-{name}")["source"]["note"] == NOTE
        convert(tmp_path / name, "hdf5", tmp_path / f"other-{name}", note="other")
        assert report_of(zb, "info", tmp_path / f"other-{name}")["source"]["note"] == "other"


def test_a_note_of_documents_lies_in_each_shard(texts, tmp_path):
    how = {"tokenizer": "byte", "workers": 1, "note": NOTE}
    convert(texts, "stream", tmp_path / "stream", **how)
    convert(texts, "hdf5", tmp_path / "rows", batch_size=4, seq_len=16, **how)
    for name in ("stream", "rows"):
        index = ShardIndex.load(tmp_path / name)
        assert index.source["note"] == NOTE
        for shard in index.shards:
            assert json.loads(attributes(tmp_path / name / shard.path)["source"])["note"] == NOTE


def test_a_note_without_a_place_and_a_long_one_are_refused(records, tmp_path):
    how = {"batch_size": 4, "seq_len": 16}
    lone = tmp_path / "x.batch"
    is_refused(ArgumentError, lambda: convert(records, "batch", lone, note="n", **how), match="no place for a note")
    is_refused(ArgumentError, lambda: convert(records, "hdf5", tmp_path / "x", note="n" * 1001, **how), match="1,001")
    convert(records, "hdf5", tmp_path / "h5", **how)
    is_refused(ArgumentError, lambda: convert(tmp_path / "h5", "npy", tmp_path / "x", note="n"), match="note")
    assert "No such option" in one_error_of_usage("hdf5-to-npy", tmp_path / "h5", tmp_path / "x", "--note", "n")
    assert not list(tmp_path.glob("x*"))


def one_error_of_usage(*arguments):
    done = run(command, *arguments)
    assert done.exit_code == 2
    return done.stderr


def test_equal_sources_give_equal_bytes_and_the_time_is_that_of_the_index(records, tmp_path):
    for name in ("one", "two", "one.h5", "two.h5"):
        convert(records, "hdf5", tmp_path / name, batch_size=4, seq_len=16, note=NOTE)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()
    for path, file in ((tmp_path / "one", tmp_path / "one" / "shards.json"), (tmp_path / "one.h5",) * 2):
        os.utime(file, (1_700_000_000.9,) * 2)
        assert report_of(zb, "info", path)["written"] == "2023-11-14T22:13:20+00:00"
        assert "2023-11-14 22:13:20 UTC" in succeed(zb, "info", path).stdout
        succeed(zb, "report", path, "-o", tmp_path / "page.html", "--force")
        assert "2023-11-14 22:13:20 UTC" in (tmp_path / "page.html").read_text()
    help_text = " ".join(run(zb, "report", "--help").stdout.split())
    assert "Only the time and the command differ when it is made again." in help_text
