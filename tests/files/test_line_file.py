"""Compressed files of lines: all of their bytes, or an error that names the file."""

import bz2
import gzip
import json
import sys

import pytest

from zb_hdf5 import convert
from zb_hdf5.errors import ConvertError, FormatError, UnavailableError
from zb_hdf5.files.line_file import unpacked
from zb_hdf5.files.look import Look
from zb_hdf5.text.json_lines import JsonLinesFile
from zb_hdf5.text.text_corpus import open_documents

zstandard = pytest.importorskip("zstandard")

LINES = [json.dumps({"text": f"document {number} " + "x" * (number % 700)}).encode() + b"\n" for number in range(3000)]
DATA = b"".join(LINES)


def zst(data, **options):
    return zstandard.ZstdCompressor(**options).compress(data)


def in_frames(data):
    """Return frames as `pzstd` writes them: one that is skipped before each, and an empty one."""
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    parts = [data[start : start + 100_000] for start in range(0, len(data), 100_000)]
    return b"".join(skipped + zst(part) for part in parts) + zst(b"")


PACKED = {
    "a.jsonl": DATA,
    "a.json": DATA,
    "A.JSONL": DATA,
    "a.jsonl.gz": gzip.compress(DATA[:50_000]) + gzip.compress(DATA[50_000:]),
    "a.json.gz": gzip.compress(DATA),
    "a.jsonl.zst": zst(DATA),
    "a.JSON.ZST": in_frames(DATA),
    "a.ndjson.zst": zstandard.ZstdCompressor().compressobj().compress(DATA),
}


@pytest.mark.parametrize("name", PACKED)
def test_all_lines_are_read(name, tmp_path):
    path = tmp_path / name
    data = PACKED[name]
    if name == "a.ndjson.zst":  # a stream, whose frame has no size
        packer = zstandard.ZstdCompressor().compressobj()
        data = packer.compress(DATA) + packer.flush()
    path.write_bytes(data)
    with Look(path) as look, unpacked(look) as file:
        assert file.readline() == LINES[0]
        assert file.tell() == len(LINES[0])
        assert file.read() == DATA[len(LINES[0]) :]
    for place in (path, tmp_path):
        [file] = open_documents([place])
        assert type(file) is JsonLinesFile
        texts = [text for block in file.blocks() for text in block.texts]
        assert texts == [json.loads(line)["text"] for line in LINES]


@pytest.mark.parametrize("cut", [1, 4, 1000, len(zst(DATA)) - 3])
def test_a_file_that_was_cut_off_is_named(cut, tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zst(DATA)[:-cut])
    with pytest.raises(FormatError, match=r"a\.jsonl\.zst: damaged or cut off: its last frame has no end"):
        [*JsonLinesFile(path).blocks()]


@pytest.mark.parametrize("data", [zst(DATA) + b"garbage", bz2.compress(DATA), DATA])
def test_other_bytes_are_named(data, tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.jsonl\.zst: damaged or cut off: "):
        [*JsonLinesFile(path).blocks()]


def test_zeros_are_unpacked_in_parts(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zst(bytes(1 << 30), level=1))
    with Look(path) as look, unpacked(look) as file:
        assert file.read(10) == bytes(10)
        assert file.raw.tell() < 1 << 27


def test_the_package_that_is_missing_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zst(DATA))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnavailableError, match="zstandard"):
        JsonLinesFile(path)


def test_a_json_beside_other_files_is_no_text_and_one_of_facts_is_none_anywhere(tmp_path):
    """`dataset_info.json` beside Parquet, `meta.json` beside token files: descriptions, which are not documents."""
    (tmp_path / "facts.json").write_bytes(DATA)
    (tmp_path / "dataset_info.json").write_text("{}")
    assert [file.path.name for file in open_documents([tmp_path])] == ["facts.json"]
    (tmp_path / "a.jsonl").write_bytes(DATA)
    assert [file.path.name for file in open_documents([tmp_path])] == ["a.jsonl"]
    (tmp_path / "a.jsonl").rename(tmp_path / "a.bin")
    with pytest.raises(ConvertError, match=r"expected files that end in .*\.json"):
        open_documents([tmp_path], "jsonl")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl.zst", "A.JSONL"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_rows_of_ids_are_read_as_such(name, in_folder, tmp_path):
    lines = b"".join(json.dumps({"input_ids": [number, 1, 2]}).encode() + b"\n" for number in range(40))
    folder = tmp_path / "in" / "part"
    folder.mkdir(parents=True)
    packed = zst(lines) if name.endswith(".zst") else gzip.compress(lines) if name.endswith(".gz") else lines
    (folder / name).write_bytes(packed)
    report = convert(tmp_path / "in" if in_folder else folder / name, "stream", tmp_path / "out")
    assert report.counts.tokens_in == 120
