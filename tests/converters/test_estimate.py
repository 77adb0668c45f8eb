"""Dry runs of documents: nothing is written, and the tokens are counted, or estimated from a sample."""

import gzip
import json
import re
import time

import numpy as np
import pytest
from commandline import report_of, run
from contents import write_stream

from zb_hdf5 import convert
from zb_hdf5.converters import batch_source, estimate, rehearsal
from zb_hdf5.converters.cli import convert_commands
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.run import plan

TEXTS = ["".join(chr(97 + (7 * number + k) % 26) for k in range(20 + number % 90)) for number in range(12_000)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a source of each kind whose tokens are known when they are read, with the options that it needs."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("sources")
    ids = [[*text.encode()] for text in TEXTS]
    parquet.write_table(pa.table({"input_ids": ids}), folder / "ids.parquet", row_group_size=1500)
    parquet.write_table(pa.table({"text": TEXTS}), folder / "text.parquet", row_group_size=1500)
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids[:4000]))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "text.jsonl").write_text(lines)
    (folder / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
    few = [np.array(row, "<u2") for row in ids[:4000]]
    write_stream(folder / "stream.h5", np.concatenate(few), [*map(len, few)])
    text = ["--tokenizer", "byte"]
    return {
        "ids.parquet": (folder / "ids.parquet", []),
        "text.parquet": (folder / "text.parquet", text),
        "ids.jsonl": (folder / "ids.jsonl", ["--from", "hf"]),
        "text.jsonl": (folder / "text.jsonl", text),
        "text.jsonl.gz": (folder / "text.jsonl.gz", text),
        "stream.h5": (folder / "stream.h5", []),
    }


@pytest.mark.parametrize("target", ["hdf5", "stream", "megatron"])
@pytest.mark.parametrize(
    "name", ["ids.parquet", "text.parquet", "ids.jsonl", "text.jsonl", "text.jsonl.gz", "stream.h5"]
)
@pytest.mark.thin
def test_a_dry_run_of_documents_is_near_the_run_and_writes_nothing(sources, tmp_path, monkeypatch, name, target):
    monkeypatch.setattr(rehearsal, "SAMPLE_S", 0.1)
    source, how = sources[name]
    how = [source, tmp_path / "out", "--to", target, *how, *(["--seq-len", 64] if target == "hdf5" else [])]
    how += ["--tokens-only"] if name == "stream.h5" and target == "megatron" else []
    samples = (1 << 18, estimate.SAMPLE_GROUP_BYTES)
    planned = []
    for sample in samples:
        monkeypatch.setattr(estimate, "SAMPLE_GROUP_BYTES", sample)
        planned.append(report_of(convert_commands, *how, "--dry-run"))
        assert not [*tmp_path.iterdir()]
    report = report_of(convert_commands, *how)
    for sample, found in zip(samples, planned, strict=True):
        monkeypatch.setattr(estimate, "SAMPLE_GROUP_BYTES", sample)
        printed = run(convert_commands, *how, "--dry-run", "--force", code=0).stdout
        require_near(found, printed, report, few=20 if name.endswith("gz") else 2)


def require_near(planned, printed, report, few):
    """See that a dry run is near the run; `few`: compressed bytes are known, and these texts have patterns."""
    assert planned["num_shards"] == report["num_shards"]
    if "num_batches" in planned:  # of a stream whose rows are planned
        return
    low, high = (
        (report["tokens_in"] / few, 2 * report["tokens_in"]) if planned["is_estimate"] else [report["tokens_in"]] * 2
    )
    assert low <= planned["num_tokens"] <= high
    assert bool(re.search(r"tokens +about ", printed)) == planned["is_estimate"]


@pytest.fixture
def little_room(monkeypatch):
    """Have 4 KiB that are free."""
    monkeypatch.setattr("zb_hdf5.converters.dry_run.free_room", lambda folder: {"bytes": 4096, "inodes": 99})


@pytest.mark.parametrize("target", ["hdf5", "stream", "megatron"])
@pytest.mark.thin
def test_a_dry_run_of_documents_that_do_not_fit_fails(target, sources, tmp_path, little_room):
    source, how = sources["text.jsonl"]
    how = [source, tmp_path / "out", "--to", target, *how]
    text = run(convert_commands, *how, "--dry-run", code=1).stdout
    assert re.search(rf"^does not fit +{tmp_path}: needs .*, only 4.0 KiB are free; free some", text, re.MULTILINE)
    planned = report_of(convert_commands, *how, "--dry-run", code=1)
    assert (planned["fits"], planned["seconds"] > 0) == (False, True)
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_of_more_than_the_disk_has_fails_and_tells_files_and_time(tmp_path):
    """A source of 15 TiB, which is a hole: by default 500 shards and no more."""
    records = 15 << 40 >> 13
    with open(tmp_path / "large.npy", "wb") as file:
        facts = {"descr": "<i4", "fortran_order": False, "shape": (records, 2048)}
        np.lib.format.write_array_header_1_0(file, facts)
        file.truncate(file.tell() + records * 8192)
    how = ["npy-to-hdf5", tmp_path / "large.npy", tmp_path / "out", "--dry-run"]
    text = run(convert_commands, *how, code=1).stdout
    assert re.search(r"^shards +500, the largest 30\.", text, re.MULTILINE)
    assert re.search(r"^files +503 inodes of ", text, re.MULTILINE)
    assert re.search(r"^time +about \d[\d,]*:\d\d:\d\d, by a sample$", text, re.MULTILINE)
    assert re.search(r"^does not fit .* needs 15\.\d TiB, only ", text, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["large.npy"]


def test_what_an_interrupted_conversion_has_written_needs_no_room(sources, tmp_path, little_room, monkeypatch):
    np.save(tmp_path / "a.npy", np.arange(4096, dtype=np.uint16).reshape(-1, 64))
    how = ["npy-to-batch", tmp_path / "a.npy", tmp_path / "out", "--batch-size", 4, "--dry-run"]
    assert not report_of(convert_commands, *how, code=1)["fits"]
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "shard-00000-of-00001.batch").write_bytes(bytes(1 << 20))
    assert report_of(convert_commands, *how, "--resume", code=0)["fits"]


@pytest.mark.parametrize("codec", ["none", "gzip:1"])
def test_the_time_of_a_dry_run_is_that_of_its_sample(codec, tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.arange(64 << 10, dtype=np.uint32).reshape(-1, 64))
    monkeypatch.setattr(rehearsal, "SAMPLE_S", 0.0)  # one group
    monkeypatch.setattr(batch_source, "GROUP_BYTES", 1 << 14)
    planned = plan(Conversion(tmp_path / "a.npy", "hdf5", tmp_path / "out", batch_size=4, codec=codec, workers=1))
    begin_s = time.monotonic()
    convert(tmp_path / "a.npy", "hdf5", tmp_path / "out", batch_size=4, codec=codec, workers=1)
    assert 0 < planned.seconds < 100 * (time.monotonic() - begin_s)
    with rehearsal.Rehearsal(tmp_path) as two:
        two.write(np.zeros((4, 1024), np.uint16))
    assert two.seconds_of(0.5, 0, 2) == pytest.approx(two.seconds)
    assert two.seconds_of(0.5, 8192, 1) > two.seconds_of(0.5, 0, 1)
    assert two.seconds_of(0.0, 0, 1) == 0.0


def test_a_dry_run_refuses_what_is_there(sources, tmp_path):
    (tmp_path / "out").mkdir()
    source, how = sources["text.jsonl"]
    done = run(convert_commands, source, tmp_path / "out", "--to", "stream", *how, "--dry-run", code=1)
    assert "exists already" in done.stderr
