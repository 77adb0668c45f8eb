"""Files of other trainers, read in place: the ids and documents that their own libraries wrote, by our orders."""

import hashlib
import json
import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import one_error, report_of, run_zb
from contract import is_refused
from packed import tokens_of
from reading import looking

from zb_hdf5 import DocumentLoader, Loader, convert, errors, open_corpus, open_reader
from zb_hdf5.commands.zb import zb
from zb_hdf5.formats import npy
from zb_hdf5.trainers.bin import LLMC_HEADER_BYTES

GOLDEN = Path(__file__).parents[1] / "data" / "trainers"
#: Written by the trainers' own libraries: see .ci/peers.
WRITTEN = [
    "megatron/uint16", "megatron/int32", "megatron/sentences", "datatrove/uint16", "datatrove/uint32",
    "datatrove/loss",
]  # fmt: skip
SHAPE = {"batch_size": 4, "seq_len": 64}


def ids_file(folder):
    """Return the file of the ids of a folder."""
    return next(file for file in sorted(folder.iterdir()) if file.suffix in (".bin", ".ds"))


@pytest.fixture
def copied(tmp_path):
    """Return `copied(name)`: a golden folder that a test may damage."""
    return lambda name: Path(shutil.copytree(GOLDEN / name, tmp_path / name.replace("/", "-")))


@pytest.fixture(params=WRITTEN)
def folder(request):
    return GOLDEN / request.param


@pytest.fixture
def truth(folder):
    return json.loads((folder / "truth.json").read_text())


@pytest.mark.parametrize("access", ["auto", "mmap", "pread"])
def test_ids_and_documents_are_those_that_were_written(folder, truth, access):
    with open_corpus(folder, access=access) as stream:
        tokens = stream.tokens[0 : stream.num_tokens]
        assert hashlib.sha256(tokens.astype(np.int64)).hexdigest() == truth["sha256"]
        assert np.diff(stream.doc_offsets).tolist() == truth["lengths"]
        assert len(stream.documents) == len(truth["lengths"])
        np.testing.assert_array_equal(stream.documents[2].ids, tokens[6:136])
    if access == "auto":  # a file stands for a folder of one
        with open_corpus(ids_file(folder)) as stream:
            np.testing.assert_array_equal(stream.tokens[0 : stream.num_tokens], tokens)


@pytest.mark.parametrize("shuffle", ["global", "records", "block", "sequential"])
def test_batches_are_those_of_the_same_ids_in_a_npy_file(folder, truth, shuffle, tmp_path):
    with open_corpus(folder) as stream:
        np.save(tmp_path / "same.npy", np.array(stream.tokens[0 : stream.num_tokens]))
    how = {**SHAPE, "shuffle": shuffle, "rank": 0, "world_size": 1, "seed": 3}
    with Loader(folder, **how) as loader, Loader(tmp_path / "same.npy", **how) as same:
        batches = list(loader)
        assert torch.equal(torch.stack(batches), torch.stack(list(same)))
    with Loader(folder, **how) as loader:  # a state is exact, also on other ranks
        steps = iter(loader)
        for _ in range(10):
            next(steps)
        state = loader.state_dict()
    with Loader(folder, **how) as resumed:
        resumed.load_state_dict(state)
        assert torch.equal(torch.stack(list(resumed)), torch.stack(batches[10:]))


def test_documents_of_batches_follow_from_the_lengths(folder, truth):
    ends = np.cumsum([0, *truth["lengths"]])
    with Loader(folder, **SHAPE, shuffle="sequential", documents=True, rank=0, world_size=1) as loader:
        for number, batch in zip(range(5), loader, strict=False):
            start = number * 256
            inside = ends[(ends > start) & (ends < start + 256)] - start
            cuts = np.unique([0, *inside, *range(0, 257, 64)])
            assert np.array_equal(batch["cu_seqlens"].numpy(), cuts)
    with DocumentLoader(folder, batch_size=3, shuffle="sequential", collate="pad", rank=0, world_size=1) as loader:
        lengths = [int(length) for batch in loader for length in batch["seq_lens"]]
    assert lengths[:30] == [length for length in truth["lengths"] if length][:30]


def test_every_command_reads_them(folder, truth, tmp_path):
    facts = report_of(zb, "info", folder)
    assert (facts["kind"], facts["tokens"], facts["documents"]) == ("stream", sum(truth["lengths"]), 60)
    shape = ("--batch-size", 4, "--seq-len", 64)
    assert "document 2" in run_zb("show", folder, "--batch", 0, *shape, code=0).output
    run_zb("report", folder, "-o", tmp_path / "report.html", code=0)
    run_zb("which", folder, "--batch", 1, *shape, code=0)
    done = run_zb("verify", folder, code=6)
    assert "hold no digests" in done.output


@pytest.mark.parametrize("packing", ["best-fit", "concat", "pad"])
@pytest.mark.thin
def test_documents_are_packed_into_a_store_as_those_of_our_streams(folder, truth, packing, tmp_path):
    report = convert(folder, "hdf5", tmp_path / "store", seq_len=64, batch_size=4, packing=packing, workers=1)
    assert report.counts.tokens_in == sum(truth["lengths"])
    with open_corpus(folder) as stream, open_reader(tmp_path / "store") as reader:
        tokens = np.array(stream.tokens[0 : stream.num_tokens])
        np.testing.assert_array_equal(reader.corpus.documents.offsets, stream.doc_offsets)
        held = np.zeros(len(tokens), np.int64)
        for number in range(reader.num_batches):
            rows = tokens_of(reader.read_batch_pieces(number))
            offsets = np.array([-1 if offset is None else offset for row in rows for _, offset, _ in row])
            is_text = offsets >= 0
            np.testing.assert_array_equal(reader.read_batch(number).ravel()[is_text], tokens[offsets[is_text]])
            np.add.at(held, offsets[is_text], 1)
    lost = sum(report.counts.dropped.values())
    assert held.max() == 1
    assert held.sum() == len(tokens) - lost
    run_zb("verify", tmp_path / "store", code=0)


def write_llmc(path, ids, magic=20240520, version=1, count=None):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(head.tobytes() + np.asarray(ids).tobytes())
    return path


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_the_files_of_llmc_are_one_stream(magic, version, dtype, tmp_path):
    ids = np.random.default_rng(1).integers(0, 50_000, 3000).astype(dtype)
    for number, part in enumerate(np.split(ids, [1000])):
        write_llmc(tmp_path / f"train_{number:06}.bin", part, magic, version)
    with open_corpus(tmp_path) as stream:
        np.testing.assert_array_equal(stream.tokens[0:3000], ids)
        assert not stream.has_documents
    with open_reader(tmp_path, batch_size=2, seq_len=100) as reader:
        np.testing.assert_array_equal(np.concatenate(list(reader)).ravel(), ids)


@pytest.mark.parametrize(("change", "kind", "words"), [
    ({"magic": 20240522}, errors.FormatError, "evaluation file"),
    ({"version": 2}, errors.FormatError, "version 1"),
    ({"count": 2001}, errors.IncompleteError, "expected 5,026 bytes"),
    ({"count": -1}, errors.FormatError, "-1"),
])  # fmt: skip
def test_other_files_of_llmc_are_refused(change, kind, words, tmp_path):
    path = write_llmc(tmp_path / "x.bin", np.arange(2000, dtype="<u2"), **change)
    is_refused(kind, lambda: open_corpus(path), match=words)
    assert LLMC_HEADER_BYTES == 1024


def cut_ids(folder):
    path = ids_file(folder)
    path.write_bytes(path.read_bytes()[:-2])


def index_of(folder):
    return next(file for file in folder.iterdir() if file.suffix in (".idx", ".index"))


def patched(offset, data):
    def change(folder):
        path = index_of(folder)
        content = bytearray(path.read_bytes())
        begin = offset if offset >= 0 else len(content) + offset
        content[begin : begin + len(data)] = data
        path.write_bytes(content)

    return change


@pytest.mark.parametrize(("name", "change", "kind", "words"), [
    ("megatron/uint16", cut_ids, errors.IncompleteError, "expected 38,688 bytes, as corpus_text_document.idx has it"),
    ("datatrove/uint16", cut_ids, errors.IncompleteError, "ids of 2 or 4 bytes"),
    ("megatron/uint16", patched(18, struct.pack("<Q", 2**60)), errors.IncompleteError, "1,152,921,504,606,846,976"),
    ("megatron/uint16", patched(26, struct.pack("<Q", 0)), errors.FormatError, "expected the edges of its documents"),
    ("megatron/uint16", patched(9, struct.pack("<Q", 2)), errors.FormatError, "version 1"),
    ("megatron/uint16", patched(17, b"\x07"), errors.FormatError, "found code 7"),
    ("megatron/uint16", patched(-8, struct.pack("<q", 59)), errors.FormatError, "found 0 to 59"),
    ("megatron/uint16", lambda folder: index_of(folder).write_bytes(b"MMIDIDX\x00\x00"), errors.IncompleteError, "34"),
    ("datatrove/uint16", lambda folder: index_of(folder).unlink(), errors.IncompleteError, "found no file"),
    ("datatrove/uint16", lambda folder: index_of(folder).write_bytes(b"12345"), errors.IncompleteError, "8 bytes"),
    ("datatrove/uint16", patched(-8, struct.pack("<Q", 2**60)), errors.IncompleteError, "belongs to another index"),
    ("megatron/multimodal", lambda folder: None, errors.FormatError, "multimodal"),
    ("megatron/uint16", patched(34, struct.pack("<i", 6)), errors.FormatError, "expected sequences that follow each"),
])  # fmt: skip
def test_damage_is_one_message_at_opening(name, change, kind, words, copied):
    folder = copied(name)
    change(folder)
    is_refused(kind, lambda: open_corpus(folder), match=words)
    assert words in one_error(run_zb("info", folder))


@pytest.mark.parametrize(("name", "change"), [
    ("megatron/uint16", patched(34 + 60 * 12 + 8, struct.pack("<q", 50))),  # the edge after the first document
    ("datatrove/uint16", patched(0, struct.pack("<Q", 2**63))),
])  # fmt: skip
def test_damage_among_the_documents_is_found_when_they_are_read(name, change, copied):
    folder = copied(name)
    change(folder)
    with open_corpus(folder) as stream:
        is_refused(errors.FormatError, lambda: stream.doc_offsets, match="expected")


def test_documents_of_a_file_that_was_replaced_are_refused(tmp_path):
    for number in range(2):
        write_llmc(tmp_path / f"{number}.bin", np.arange(100, dtype="<u2"))
    with open_corpus(tmp_path) as stream:
        write_llmc(tmp_path / "1.bin", np.arange(150, dtype="<u2"))
        is_refused(errors.FormatError, lambda: stream.doc_offsets, match="changed since it was opened")


def test_a_folder_of_which_a_part_is_not_recognised_is_refused(copied):
    folder = copied("megatron/uint16")
    shutil.copy(ids_file(folder), folder / "second.bin")  # its .idx is still to come
    is_refused(errors.FormatError, lambda: open_corpus(folder), match=r"second\.bin: expected an \.idx file")
    assert "second.bin" in one_error(run_zb("info", folder))
    (folder / "second.bin").rename(folder / ".second.bin")
    with open_corpus(folder) as stream:
        assert len(stream.files) == 1


def test_a_folder_of_other_files_is_refused_as_before(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(range(200)))
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "x.bin"), match="megatron .an .idx beside it")
    is_refused(errors.FormatError, lambda: open_reader(tmp_path), match=r"x\.bin: .* source_dtype='uint16'$")
    (tmp_path / "x.bin").rename(tmp_path / "x.dat")
    is_refused(errors.FormatError, lambda: open_reader(tmp_path), match="no shards.json")


def test_mixed_dtypes_are_no_ids_of_one_tokenizer(tmp_path):
    for number, (magic, version, dtype) in enumerate(
        [(20240520, 1, "<u2"), (20240520, 1, "<u2"), (20240801, 7, "<u4")]
    ):
        write_llmc(tmp_path / f"{number}.bin", np.arange(100, dtype=dtype), magic, version)
    is_refused(
        errors.FormatError, lambda: open_corpus(tmp_path), match=r"2\.bin: expected ids of uint16, as 0\.bin has"
    )


def test_the_ids_of_an_index_may_be_missing(copied):
    folder = copied("megatron/uint16")
    ids_file(folder).unlink()
    is_refused(errors.IncompleteError, lambda: open_corpus(index_of(folder)), match="found no file")
    assert "found no file" in one_error(run_zb("info", index_of(folder)))


def test_a_folder_is_opened_by_one_look_at_each_header(tmp_path, monkeypatch):
    for number in range(200):
        write_llmc(tmp_path / f"{number:03}.bin", np.arange(100, dtype="<u2"))
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(str(path)) or real(path, *rest, **more))
    with open_reader(tmp_path, batch_size=2, seq_len=8) as reader:
        assert reader.num_batches == 1250
    headers = [path for path in opened if path.endswith(".bin")]
    assert len(headers) <= 200 + 3  # the first one is recognised, and opened to be read


@pytest.mark.parametrize("array", [
    np.arange(10, dtype="u1"), np.arange(10, dtype=">i8"), np.zeros((3, 4), "<u2"), np.zeros((0, 4), "<u2"),
    np.zeros(0, "<i4"), np.asfortranarray(np.zeros((3, 4), "<i2")), np.zeros((2, 3, 4), "<u4"), np.zeros((), "<u4"),
    np.zeros(3, "f4"), np.zeros(3, "i2,i2"),
])  # fmt: skip
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_a_plain_header_of_numpy_is_read_as_its_parser_does(array, version, tmp_path, monkeypatch):
    path = tmp_path / "a.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version)
    found = looking(npy.npy_header, path)
    monkeypatch.setattr(npy, "PLAIN_HEADER", re.compile(b"never"))
    assert looking(npy.npy_header, path) == found
    assert found[0] == array.shape


def mask_of(lengths):
    """Return the loss mask that the golden files have: see `peers/truth.py`."""
    return np.concatenate([np.arange(length) % 3 != 0 for length in lengths]).astype(np.uint8)


def test_a_loss_mask_is_a_field(tmp_path):
    golden = GOLDEN / "datatrove" / "loss"
    expected = mask_of(json.loads((golden / "truth.json").read_text())["lengths"])
    with open_corpus(golden) as stream:
        assert [field.name for field in stream.fields] == ["loss_mask"]
        np.testing.assert_array_equal(stream.field("loss_mask").tokens[0 : stream.num_tokens], expected)
        tokens = np.array(stream.tokens[0 : stream.num_tokens]).astype(np.int64)
    for access in ("auto", "mmap", "pread"):
        with Loader(golden, **SHAPE, access=access, fields=["loss_mask"], rank=0, world_size=1, seed=4) as loader:
            for batch in loader:  # the values of a field are those of their ids
                row = batch["tokens"][0].numpy()
                start = next(k for k in range(0, len(tokens), 64) if np.array_equal(tokens[k : k + 64], row))
                np.testing.assert_array_equal(batch["loss_mask"][0], expected[start : start + 64])
    with Loader(golden, **SHAPE, shuffle="sequential", targets=True, rank=0, world_size=1) as loader:
        y = torch.cat([y.reshape(-1) for _, y in loader]).numpy()
    np.testing.assert_array_equal(y, np.where(expected == 1, tokens, -100)[1 : len(y) + 1])
    assert report_of(zb, "info", golden)["fields"].keys() == {"loss_mask"}
    convert(golden, "datatrove", tmp_path / "out", workers=1)  # and back: the same bytes
    written = next((tmp_path / "out").glob("*.ds.loss"))
    assert written.read_bytes() == next(golden.glob("*.ds.loss")).read_bytes()
    convert(golden, "hdf5", tmp_path / "rows", seq_len=64, batch_size=4, packing="concat", shuffle=False, workers=1)
    with open_reader(tmp_path / "rows") as reader:
        np.testing.assert_array_equal(reader.field("loss_mask").read_batch(2).ravel(), expected[512:768])


def test_a_loss_mask_of_other_ids_is_refused(copied):
    folder = copied("datatrove/loss")
    loss = next(folder.glob("*.loss"))
    for name in ("1.ds", "1.ds.index"):  # a file without a mask beside one that has it
        shutil.copy(folder / f"00000_unshuffled{name[1:]}", folder / name)
    is_refused(errors.FormatError, lambda: open_corpus(folder), match=r"1\.ds: expected loss_mask, as .* found none")
    shutil.copy(loss, folder / "1.ds.loss")
    with open_corpus(folder) as stream:
        assert stream.field("loss_mask").num_tokens == 2 * 19_344
    with open_corpus(folder) as stream:
        loss.unlink()
        is_refused(errors.FormatError, lambda: stream.field("loss_mask").tokens[0:9], match="was replaced")
    loss.write_bytes(b"\1" * 19_343)
    words = "loss: expected a byte for each of 19,344 ids, found 19,343 bytes"
    is_refused(errors.IncompleteError, lambda: open_corpus(folder), match=words)
