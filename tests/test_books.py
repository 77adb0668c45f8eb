"""examples/pretrain_books.py: from text to a model whose bits per byte fall, stopped and resumed."""

import json
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "pretrain_books.py"
SMALL = ["--vocab-size", "512", "--width", "32", "--layers", "1", "--eval-every", "10", "--lr", "0.01"]


def pretrain(books, out, *arguments):
    command = [sys.executable, str(EXAMPLE), str(books), "--out", str(out), *SMALL, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parent.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_bits_per_byte_fall_and_a_rerun_resumes(tmp_path):
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    pytest.importorskip("tokenizers"), pytest.importorskip("tiktoken"), pytest.importorskip("matplotlib")
    books, out = tmp_path / "books", tmp_path / "run"
    books.mkdir()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for number in range(3):
        texts = [path.read_text(encoding="utf-8") for path in sources[number::3]]
        parquet.write_table(table({"text": texts}), books / f"shard_{number:05d}.parquet")
    first = pretrain(books, out, "--steps", "20")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("\n$ zb ") == 3
    assert (out / "bpb.png").read_bytes().startswith(b"\x89PNG")
    before = json.loads((out / "result.json").read_text())
    rows = before["evaluations"]
    assert [row["step"] for row in rows] == [0, 10, 20]
    assert rows[-1]["val_bpb"] < 0.9 * rows[0]["val_bpb"]

    second = pretrain(books, out, "--steps", "40")
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("\n$ zb ") == 1  # only verify
    assert "from step 20 to 40" in second.stdout
    after = json.loads((out / "result.json").read_text())
    assert after["evaluations"][:3] == rows
    assert [row["step"] for row in after["evaluations"]] == [0, 10, 20, 30, 40]
    for row in after["evaluations"]:
        assert row["tokens"] == row["step"] * 16 * 256
        assert row["val_bpb"] == pytest.approx(row["val_nats"] / math.log(2) / after["val_bytes"])
        assert row["waited_s"] <= row["seconds"]
    assert after["val_tokens"] < after["val_bytes"]
    assert after["evaluations"][-1]["val_bpb"] < after["evaluations"][2]["val_bpb"]

    other = pretrain(books, out, "--steps", "40", "--width", "64")
    assert other.returncode == 1
    assert "was made with width 32, not 64; pass another --out" in other.stderr
