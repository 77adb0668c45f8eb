"""A small corpus, for the tests of what is made of text."""

import json

import numpy as np
import pytest

from zb_hdf5.text import json_lines
from zb_hdf5.text.text_corpus import open_documents


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(3)
    return ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 60)))) for _ in range(150)]


@pytest.fixture
def files(tmp_path, texts, monkeypatch):
    """Return two files of JSON lines, of several row groups each."""
    monkeypatch.setattr(json_lines, "ROW_GROUP_BYTES", 2000)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, part in (("a", texts[:90]), ("b", texts[90:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    opened = open_documents([folder])
    yield opened
    for file in opened:  # which pytest still holds when it looks for open files
        file.close()
