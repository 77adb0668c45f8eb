"""The command lines of the pages about conversions run, in their order, over files of the names that they have."""

import json
import os
import re
import shutil
from pathlib import Path

import h5py
import mds_folder
import numpy as np
import pytest
from pages import TEXT, ran

from zb_hdf5 import convert

pytestmark = pytest.mark.slow

#: Tokens of each of two files; a boundary token ends each thousand.
TOKENS = 350_000
BOUNDARY = 50_256


def tokens_of(seed):
    tokens = np.random.default_rng(seed).integers(0, BOUNDARY, TOKENS, dtype=np.uint16)
    tokens[999::1000] = BOUNDARY
    return tokens


def arrays():
    Path("tokens").mkdir()
    for number in range(2):
        np.save(f"tokens/{number}.npy", tokens_of(number))


def stored_batches():
    arrays()
    convert("tokens", "hdf5", "train-h5", batch_size=32, shards=4)


def two_formats():
    arrays()
    os.mkdir("books")


def hdf5_files():
    Path("theirs").mkdir()
    for number, name in enumerate("ab"):
        with h5py.File(f"theirs/{name}.h5", "w") as h5:
            h5["tokens"] = tokens_of(number)
        with h5py.File(f"{name}.h5", "w") as h5:
            h5["data/ids"] = tokens_of(number).reshape(-1, 50)
    with h5py.File("ragged.h5", "w") as h5:
        h5["train/values"] = tokens_of(3)
        h5["train/indptr"] = np.arange(0, TOKENS + 1, 1000)


def rows_of_ids():
    table = pytest.importorskip("pyarrow").table
    parquet = pytest.importorskip("pyarrow.parquet")
    stream("train-stream")
    convert("train-stream", "hf", "saved")
    rows = tokens_of(4).reshape(-1, 1000)
    parquet.write_table(
        table({"input_ids": rows.tolist(), "url": [f"u/{k}" for k in range(len(rows))]}), "corpus.parquet"
    )
    Path("packed").mkdir()
    parquet.write_table(table({"input_ids": rows[:, :128].tolist()}), "packed/0.parquet")
    Path("mds").mkdir()
    samples = [(row.astype("<i8").tobytes(),) for row in rows]
    mds_folder.write(Path("mds/train"), samples, {"tokens": "bytes"})


def stream(path):
    arrays()
    convert("tokens", "stream", path, boundary_token_id=BOUNDARY)


def documents():
    pytest.importorskip("tokenizers")
    stream("train-stream")
    shutil.copytree("train-stream", "chats-stream")
    rows = [{"text": f"document {number} has the words {number * 7} and {number * 13}"} for number in range(4000)]
    Path("corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ran(["zb tokenizer train corpus.jsonl --vocab-size 300 -o tok.json"])


#: Page -> a function that makes the files which its lines name.
PAGES = {
    "convert.md": arrays,
    "convert_stores.md": stored_batches,
    "forms.md": two_formats,
    "convert_hdf5.md": hdf5_files,
    "convert_ids.md": rows_of_ids,
    "convert_for_trainers.md": documents,
}
#: The page of lines that stand for each other: each writes the same store.
ALTERNATIVES = "convert_ids.md"


@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_run_as_they_stand(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PAGES[page]()
    blocks = re.findall(r"^```\n(.*?)^```", TEXT[page], re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("zb ")]
    assert len(lines) > 1
    for line in lines:
        if page == ALTERNATIVES:
            shutil.rmtree("train-h5", ignore_errors=True)
        ran([line])
