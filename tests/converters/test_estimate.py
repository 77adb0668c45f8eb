"""Dry runs of documents: nothing is written, and the tokens are counted, or estimated from a sample."""

import gzip
import json
import re

import numpy as np
import pytest
from commandline import report_of, run
from contents import write_stream

from zb_hdf5.converters import estimate
from zb_hdf5.converters.cli import convert_commands

TEXTS = ["".join(chr(97 + (7 * number + k) % 26) for k in range(20 + number % 90)) for number in range(40_000)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a source of each kind whose tokens are known when they are read, with the options that it needs."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("sources")
    ids = [[*text.encode()] for text in TEXTS]
    parquet.write_table(pa.table({"input_ids": ids}), folder / "ids.parquet", row_group_size=5000)
    parquet.write_table(pa.table({"text": TEXTS}), folder / "text.parquet", row_group_size=5000)
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
@pytest.mark.parametrize("sample", [1 << 18, estimate.SAMPLE_GROUP_BYTES])
def test_a_dry_run_of_documents_is_near_the_run_and_writes_nothing(
    sources, tmp_path, monkeypatch, name, target, sample
):
    monkeypatch.setattr(estimate, "SAMPLE_GROUP_BYTES", sample)
    source, how = sources[name]
    how = [source, tmp_path / "out", "--to", target, *how, *(["--seq-len", 64] if target == "hdf5" else [])]
    how += ["--tokens-only"] if name == "stream.h5" and target == "megatron" else []
    planned = report_of(convert_commands, *how, "--dry-run")
    assert not [*tmp_path.iterdir()]
    report = report_of(convert_commands, *how)
    assert planned["num_shards"] == report["num_shards"]
    if "num_batches" in planned:  # of a stream whose rows are planned
        return
    few = 20 if name.endswith("gz") else 2  # its compressed bytes are known, and these texts have patterns
    low, high = (
        (report["tokens_in"] / few, 2 * report["tokens_in"]) if planned["is_estimate"] else [report["tokens_in"]] * 2
    )
    assert low <= planned["num_tokens"] <= high
    text = run(convert_commands, *how, "--dry-run", "--force", code=0).stdout
    assert bool(re.search(r"tokens +about ", text)) == planned["is_estimate"]


def test_a_dry_run_refuses_what_is_there(sources, tmp_path):
    (tmp_path / "out").mkdir()
    source, how = sources["text.jsonl"]
    done = run(convert_commands, source, tmp_path / "out", "--to", "stream", *how, "--dry-run", code=1)
    assert "exists already" in done.stderr
