"""Files without a header, of nanoGPT and OLMo: the dtype of their ids is named, and never guessed."""

import gzip
import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import one_error, report_of, run, run_zb
from contents import write_batches
from contract import is_refused
from interrupted import Failing, Stops
from pins import counted_opens
from reading import reading

from zb_hdf5 import (
    DocumentLoader,
    Loader,
    ReadAs,
    convert,
    errors,
    open_corpus,
    open_reader,
    verify_store,
    write_digests,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert_commands
from zb_hdf5.read_as import SOURCE_DTYPES
from zb_hdf5.trainers.bin import LLMC_HEADER_BYTES, MAX_TOKENS

GOLDEN = Path(__file__).parents[1] / "data" / "trainers"
SHAPE = {"batch_size": 4, "seq_len": 64}
ONE_RANK = {"rank": 0, "world_size": 1}
IDS = np.random.default_rng(7).integers(0, 120, 3000)


def truth_of(folder):
    return json.loads((folder / "truth.json").read_text())


def ids_of(path, **how):
    with open_corpus(path, **how) as stream:
        return np.array(stream.tokens[0 : stream.num_tokens])


@pytest.fixture
def train(tmp_path):
    """Return the path of a file as nanoGPT has it, with its dictionary beside it, which is a pickle."""
    (tmp_path / "meta.pkl").write_bytes(b"cos\nabort\n(tR.")  # unpickled, it would end this process
    path = tmp_path / "train.bin"
    IDS.astype("<u2").tofile(path)
    return path


@pytest.mark.parametrize("name", ["bin/nanogpt", "olmo/uint16", "olmo/uint32"])
def test_ids_are_those_that_were_written(name):
    truth = truth_of(GOLDEN / name)
    found = ids_of(GOLDEN / name, read_as=ReadAs(source_dtype=truth["source_dtype"]))
    assert hashlib.sha256(found.astype(np.int64)).hexdigest() == truth["sha256"]
    file = next(each for each in (GOLDEN / name).iterdir() if each.suffix in (".bin", ".npy"))
    np.testing.assert_array_equal(ids_of(file, read_as=ReadAs(source_dtype=truth["source_dtype"])), found)


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_a_header_has_the_dtype(name):
    folder = GOLDEN / "bin" / name
    found = ids_of(folder)
    assert hashlib.sha256(found.astype(np.int64)).hexdigest() == truth_of(folder)["sha256"]
    assert report_of(zb, "info", folder)["tokens"] == len(found)


@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
@pytest.mark.parametrize(("name", "skip_bytes"), [("train.bin", 0), ("train.dat", 1024), ("ids", 3)])
def test_any_suffix_dtype_and_number_of_bytes_before_the_ids(dtype, name, skip_bytes, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"\xff" * skip_bytes + IDS.astype(dtype).tobytes())
    how = reading({"source_dtype": dtype, "skip_bytes": skip_bytes})
    np.testing.assert_array_equal(ids_of(path, **how), IDS)
    np.save(tmp_path / "same.npy", IDS.astype(dtype))
    with Loader(path, **SHAPE, **ONE_RANK, **how) as loader, Loader(tmp_path / "same.npy", **SHAPE, **ONE_RANK) as same:
        assert torch.equal(torch.stack(list(loader)), torch.stack(list(same)))
        same.load_state_dict(loader.state_dict())  # their ids are the same, and so are their fingerprints


def test_files_of_a_folder_are_one_stream(tmp_path):
    for number, part in enumerate(np.split(IDS, [1000, 1001])):
        (tmp_path / f"part_{number}.bin").write_bytes(b"head" + part.astype("<u4").tobytes())
    how = reading({"source_dtype": "uint32", "skip_bytes": 4})
    with open_corpus(tmp_path, **how) as stream:
        assert not stream.has_documents
        assert stream.doc_offsets.tolist() == [0, 1000, 1001, 3000]
        again = pickle.loads(pickle.dumps(stream))
        np.testing.assert_array_equal(again.tokens[0:3000], IDS)
        again.close()
        (tmp_path / "part_3.bin").write_bytes(b"head" + IDS.astype("<u4").tobytes())
        assert stream.refresh() == 6000
    with DocumentLoader(tmp_path, collate="pad", batch_size=2, shuffle="sequential", **ONE_RANK, **how) as loader:
        assert next(loader)["seq_lens"].tolist() == [1000, 1]


def test_every_command_takes_the_dtype(train, tmp_path):
    dtype = ("--source-dtype", "uint16")
    shape = ("--batch-size", 4, "--seq-len", 64)
    facts = report_of(zb, "info", train, *dtype)
    assert (facts["kind"], facts["tokens"], facts["dtype"]) == ("stream", 3000, "uint16")
    shown = run_zb("show", train, "--batch", 0, *shape, *dtype, code=0).output
    assert str(IDS[0]) in shown
    run_zb("report", train, "-o", tmp_path / "report.html", *dtype, code=0)
    run_zb("which", train, "--batch", 1, *shape, *dtype, code=0)
    told = run_zb("doctor", train, *dtype, code=0).stdout
    assert "convert it again" not in told  # its own program would write it like this again
    assert ".bin files of llm.c or nanoGPT hold no digests" in run_zb("verify", train, *dtype, code=6).output
    run_zb("index", "digests", train, "-o", tmp_path / "digests.json", *dtype, code=0)
    run_zb("verify", train, "--digests", tmp_path / "digests.json", *dtype, code=0)
    with Loader(train, **SHAPE, **ONE_RANK, read_as=ReadAs(source_dtype="uint16")) as loader:
        next(loader)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    run_zb("which", train, "--state", tmp_path / "state.json", "--step", 3, *dtype, code=0)
    (tmp_path / "odd.dat").write_bytes(b"123")
    assert "multiple of 2" in str(verify_store(tmp_path / "odd.dat", read_as=ReadAs(source_dtype="uint16"))[0].problem)


@pytest.mark.parametrize("name", ["train.bin", "part-0.npy"])
def test_a_file_without_a_header_is_never_guessed(name, tmp_path):
    path = tmp_path / "in" / name
    path.parent.mkdir()
    IDS.astype("<u2").tofile(path)
    for where in (path, path.parent):
        words = r"found another file; .* pass their dtype to ReadAs or convert, such as source_dtype='uint16'$"
        for opened in (open_corpus, lambda it: Loader(it, **SHAPE), lambda it: open_reader(it, **SHAPE)):
            is_refused(errors.FormatError, lambda opened=opened, where=where: opened(where), match=f"{name}: .*{words}")
        for command in (("info",), ("show", "--batch", 0), ("verify",)):
            message = one_error(run_zb(command[0], where, *command[1:]))
            assert message.endswith("if it has ids and no header, pass their dtype, such as --source-dtype uint16")


def test_a_dtype_is_refused_where_a_header_has_it(tmp_path):
    np.save(tmp_path / "a.npy", IDS)
    write_batches(tmp_path / "a.h5", IDS[:2048].reshape(1, 32, 64))
    write_batches(tmp_path / "a.batch", IDS[:2048].reshape(1, 32, 64))
    headed = {
        tmp_path / "a.npy": "npy", tmp_path / "a.h5": "hdf5", tmp_path / "a.batch": "batch",
        GOLDEN / "bin/gpt2": "bin", GOLDEN / "bin/gpt2/part_train_000001.bin": "bin",
        GOLDEN / "megatron/uint16": "megatron", GOLDEN / "megatron/uint16/corpus_text_document.bin": "megatron",
        GOLDEN / "datatrove/uint16": "datatrove",
    }  # fmt: skip
    for path, name in headed.items():
        words = rf"source_dtype is for files without a header, found {name!r}: leave it out"
        is_refused(
            errors.ArgumentError,
            lambda path=path: open_corpus(path, read_as=ReadAs(source_dtype="uint16")),
            match=words,
        )
        message = one_error(run_zb("info", path, "--source-dtype", "uint16"))
        assert "--source-dtype is for files without a header" in message
    shutil.copy(GOLDEN / "bin/gpt2/part_train_000001.bin", tmp_path / "tokens.dat")  # whatever its suffix is
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(tmp_path / "tokens.dat", read_as=ReadAs(source_dtype="uint16")),
        match="'bin'",
    )
    shutil.copy(tmp_path / "a.npy", tmp_path / "array.dat")
    is_refused(
        errors.ArgumentError,
        lambda: open_corpus(tmp_path / "array.dat", read_as=ReadAs(source_dtype="uint16")),
        match="'npy'",
    )


@pytest.mark.parametrize(("how", "kind", "words"), [
    ({"source_dtype": "float32"}, errors.ArgumentError, "source_dtype must be one of uint8, .* found 'float32'"),
    ({"source_dtype": "uint16", "skip_bytes": -1}, errors.ArgumentError, "skip_bytes must be .* found -1"),
    ({"source_dtype": "uint16", "skip_bytes": 2.5}, errors.ArgumentError, "skip_bytes must be .* found 2.5"),
    ({"skip_bytes": 4}, errors.ArgumentError, "skip_bytes=4 is for files without a header: pass source_dtype too"),
    ({"source_dtype": "uint64"}, None, ""),
    ({"source_dtype": "uint64", "skip_bytes": 2}, errors.IncompleteError, r"multiple of 8 bytes, .* found 5,998"),
    ({"source_dtype": "uint16", "skip_bytes": 6001}, errors.IncompleteError, "at least the 6,001 bytes of skip_bytes"),
    ({"source_dtype": "uint16", "dataset": "ids"}, errors.ArgumentError, "channel and unwritten are for HDF5 files"),
])  # fmt: skip
def test_other_values_are_refused(how, kind, words, train):
    if kind is None:
        assert open_corpus(train, **reading(how)).num_tokens == 750
        return
    is_refused(kind, lambda: open_corpus(train, **reading(how)), match=words)


def test_a_backend_is_of_headerless_files_only(train):
    for name in ("bin", "olmo"):
        with open_reader(train, backend=name, read_as=ReadAs(source_dtype="uint16"), **SHAPE) as reader:
            assert reader.corpus.backend == name
    is_refused(
        errors.BackendError,
        lambda: open_reader(train, backend="megatron", read_as=ReadAs(source_dtype="uint16"), **SHAPE),
        match="asked for backend 'megatron', whose files have a header",
    )


def test_a_header_counts_no_more_than_its_int32(tmp_path):
    path = tmp_path / "large.bin"
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, -1
    with open(path, "wb") as file:
        file.write(head.tobytes())
        file.truncate(LLMC_HEADER_BYTES + 2 * (MAX_TOKENS + 1))
    is_refused(errors.FormatError, lambda: open_corpus(path), match="at most 2,147,483,647 ids")


# --- the documents of OLMo -------------------------------------------------------------------------------------------


@pytest.fixture
def olmo(tmp_path):
    """Return a copy of the file of OLMo, which a test may damage."""
    return Path(shutil.copytree(GOLDEN / "olmo/uint16", tmp_path / "olmo")) / "part-0-00000.npy"


@pytest.mark.parametrize("name", ["uint16", "uint32"])
def test_documents_are_those_that_were_written(name):
    folder = GOLDEN / "olmo" / name
    lengths = truth_of(folder)["lengths"]
    with open_corpus(folder, read_as=ReadAs(source_dtype=name)) as stream:
        assert stream.has_documents
        assert np.diff(stream.doc_offsets).tolist() == lengths
        assert stream.documents[2].ids.tolist() == stream.tokens[6:136].tolist()
    facts = report_of(zb, "info", folder, "--source-dtype", name)
    assert facts["documents"] == len(lengths)


def test_without_its_list_a_file_has_no_documents(olmo, tmp_path):
    shutil.copy(olmo, olmo.with_name("part-1-00000.npy"))  # one of two has no list
    for where in (olmo.parent, olmo.with_name("part-1-00000.npy")):
        with open_corpus(where, read_as=ReadAs(source_dtype="uint16")) as stream:
            assert not stream.has_documents
        assert report_of(zb, "info", where, "--source-dtype", "uint16")["documents"] is None
        words = r"in part-1-00000\.npy, which has no \.csv\.gz beside it: pass boundary_token_id"
        for target in ("stream", "hdf5"):
            packing = {"packing": "best-fit"} if target == "hdf5" else {}  # else the lone file is cut into records
            refused = lambda where=where, target=target, packing=packing: convert(  # noqa: E731
                where, target, tmp_path / "out", source_dtype="uint16", **packing
            )
            is_refused(errors.ArgumentError, refused, match=words)


def test_raw_ids_of_a_folder_become_records_or_documents(olmo, tmp_path):
    olmo.with_suffix(".csv.gz").unlink()
    shutil.copy(olmo, olmo.with_name("part-1-00000.npy"))
    ids = np.fromfile(olmo, "<u2")
    names = {"source_dtype": "uint16", "workers": 1}
    how = {"seq_len": 64, "batch_size": 2}
    convert(olmo.parent, "hdf5", tmp_path / "records", source_format="bin", shuffle=False, **how, **names)
    with open_reader(tmp_path / "records") as reader:
        found = np.concatenate(list(reader)).reshape(-1)
    np.testing.assert_array_equal(found, np.concatenate([ids] * 2)[: len(found)])  # a record crosses the files
    assert len(found) == 2 * len(ids) // 128 * 128
    convert(olmo.parent, "stream", tmp_path / "stream", boundary_token_id=50_256, **names)
    with open_corpus(tmp_path / "stream") as stream:
        np.testing.assert_array_equal(stream.tokens[0 : 2 * len(ids)], np.concatenate([ids, ids]))
        expected = 2 * (np.count_nonzero(ids == 50_256) + (ids[-1] != 50_256))
        assert stream.document_count == expected
    (tmp_path / "empty").mkdir()
    is_refused(
        errors.FormatError,
        lambda: convert(tmp_path / "empty", "hdf5", tmp_path / "out", source_format="bin", **how, **names),
        match="no .bin files of the format 'bin' in this folder",
    )


def test_a_folder_without_such_files_is_refused_by_whoever_opens_or_verifies_it(tmp_path):
    (tmp_path / "notes.txt").write_text("no ids")
    as_ids = ReadAs(source_dtype="uint16")
    for attempt in (lambda: open_corpus(tmp_path, read_as=as_ids), lambda: verify_store(tmp_path, read_as=as_ids)):
        is_refused(errors.FormatError, attempt, match="no .bin files of the format 'bin' in this folder")
    assert "no .bin files" in run_zb("verify", tmp_path, "--source-dtype", "uint16", code=1).output


def rows(*values):
    return gzip.compress("".join(f"{start},{end}\n" for start, end in values).encode())


@pytest.mark.parametrize(("content", "kind", "words"), [
    (lambda data: data[:-20], errors.IncompleteError, "a whole gzip file, found one that was cut short"),
    (lambda data: data[:100] + b"xxxxxxxx" + data[108:], errors.FormatError, "found"),
    (lambda data: b"start,end\n", errors.FormatError, "a gzip file of documents, found a damaged one"),
    (lambda data: b"", errors.FormatError, "documents of all 19,344 ids of the file, found 0 of 0"),
    (lambda data: rows((0, 10), (10, 99_999)), errors.FormatError, "found 10 to 99,999 after 10 in row 2"),
    (lambda data: rows((0, 10), (11, 19_344)), errors.FormatError, "found 11 to 19,344 after 10 in row 2"),
    (lambda data: rows((0, 10), (10, 9)), errors.FormatError, "found 10 to 9 after 10 in row 2"),
    (lambda data: rows((-5, 10)), errors.FormatError, "found -5 to 10 after 0 in row 1"),
    (lambda data: rows((0, 19_000)), errors.FormatError, "found 1 of 19,000; restore it, or remove it"),
    (lambda data: rows(*[(0, 0)] * 20_000), errors.FormatError, "at most one document for each of 19,344 ids"),
    (lambda data: gzip.compress(b"start,end\n"), errors.FormatError, "found other values in row 1"),
    (lambda data: gzip.compress(b"0,5\n5\n"), errors.FormatError, "found other values in row 2"),
    (lambda data: gzip.compress(b"0" * 3_000_000), errors.FormatError, "found field larger than .* after row 0"),
])  # fmt: skip
@pytest.mark.thin
def test_a_damaged_list_of_documents_is_one_message_where_documents_are_asked_for(content, kind, words, olmo, tmp_path):
    path = olmo.with_suffix(".csv.gz")
    path.write_bytes(content(path.read_bytes()))
    names = {"source_dtype": "uint16"}
    read_as = ReadAs(**names)
    with Loader(olmo, read_as=read_as, **SHAPE, **ONE_RANK, prefetch=0) as loader:
        next(iter(loader))
    stream = open_corpus(olmo, read_as=read_as)
    for ask in (
        lambda: stream.document_count,
        lambda: stream.doc_offsets,
        lambda: stream.documents,
        lambda: next(iter(Loader(olmo, documents=True, read_as=read_as, **SHAPE, **ONE_RANK))),
        lambda: next(iter(DocumentLoader(olmo, collate="pack", max_tokens=4096, read_as=read_as, **ONE_RANK))),
        lambda: convert(olmo, "stream", tmp_path / "out", source_format="olmo", **names),
        lambda: write_digests(olmo, tmp_path / "out.json", read_as=read_as),
    ):
        is_refused(kind, ask, match=rf"00000\.csv\.gz: expected .*{words}")
    assert not list(tmp_path.glob("*out*"))
    for command in ("info", "verify"):
        shown = run_zb(command, olmo, "--source-dtype", "uint16")
        assert (shown.exit_code != 0, "00000.csv.gz: expected" in shown.output) == (True, True), shown.output
        assert "Traceback" not in shown.output


def test_the_list_of_documents_is_read_when_documents_are_asked_for(olmo):
    """It takes a second for a million documents, in each rank."""
    shutil.copy(olmo, olmo.with_name("part-1-00000.npy"))
    shutil.copy(olmo.with_suffix(".csv.gz"), olmo.with_name("part-1-00000.csv.gz"))
    names = {"read_as": ReadAs(source_dtype="uint16")}
    with counted_opens(olmo.parent) as opens:
        with Loader(olmo.parent, **names, **SHAPE, **ONE_RANK) as loader:
            next(iter(loader))
        with open_reader(olmo.parent, **names, **SHAPE) as reader:
            reader[0]
            assert reader.corpus.has_documents
            pickle.loads(pickle.dumps(reader)).close()
        with open_corpus(olmo.parent, **names) as stream:
            assert stream.has_documents
            assert stream.refresh() == stream.num_tokens
            assert len(stream.tokens[0:20_000]) == 20_000
    assert [name for name in opens if name.endswith(".csv.gz")] == []
    with open_corpus(olmo.parent, **names) as stream:
        with counted_opens(olmo.parent) as opens:
            assert stream.document_count == 120
        assert opens.keys() >= {"part-0-00000.csv.gz", "part-1-00000.csv.gz"}
        with counted_opens(olmo.parent) as opens, pickle.loads(pickle.dumps(stream)) as copy:
            assert (stream.document_count, copy.document_count) == (120, 120)
        assert opens == {}
        with open_reader(olmo.parent, **names, **SHAPE) as reader:
            assert reader.corpus.document_count == len(reader.corpus.documents) == 120
    with open_corpus(olmo.parent, **names) as stream:
        olmo.with_suffix(".csv.gz").unlink()
        is_refused(errors.FormatError, lambda: stream.document_count, match="expected the file of its documents")
        is_refused(errors.FormatError, lambda: stream.doc_offsets, match="expected the file of its documents")


# --- conversions -----------------------------------------------------------------------------------------------------


def sha256_of(store):
    return json.loads((store / "shards.json").read_text())["sha256"]


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".dat"])
def test_records_are_cut_and_shuffled_as_those_of_arrays(suffix, tmp_path):
    path = tmp_path / f"train{suffix}"
    path.write_bytes(b"head" + IDS.astype("<i4").tobytes())
    np.save(tmp_path / "same.npy", IDS.astype("<i4"))
    how = {"seq_len": 50, "batch_size": 4, "vocab_size": 120, "seed": 7, "workers": 1}
    names = {"source_dtype": "int32", "skip_bytes": 4, "source_format": "bin" if suffix == ".npy" else "auto"}
    report = convert(path, "hdf5", tmp_path / "store", **how, **names)
    convert(tmp_path / "same.npy", "hdf5", tmp_path / "same", **how)
    assert sha256_of(tmp_path / "store") == sha256_of(tmp_path / "same")
    assert report.counts.tokens_in == 3000
    source = json.loads((tmp_path / "store" / "shards.json").read_text())["source"]
    assert (source["source_dtype"], source["skip_bytes"]) == ("int32", 4)
    options = ("--seq-len", 50, "--batch-size", 4, "--vocab-size", 120, "--seed", 7)
    typed = ("--source-dtype", "int32", "--skip-bytes", 4, "--from", "bin")
    run(convert_commands, path, tmp_path / "typed", *options, *typed, code=0)
    assert sha256_of(tmp_path / "typed") == sha256_of(tmp_path / "same")


def test_documents_of_olmo_are_kept_and_packed(tmp_path):
    folder = GOLDEN / "olmo" / "uint16"
    names = {"source_dtype": "uint16", "workers": 1}
    convert(folder, "stream", tmp_path / "stream", **names)
    with open_corpus(tmp_path / "stream") as stream:
        assert np.diff(stream.doc_offsets).tolist() == truth_of(folder)["lengths"]
    how = {"seq_len": 64, "batch_size": 4, "packing": "best-fit"}
    report = convert(folder, "hdf5", tmp_path / "rows", **how, **names)
    convert(tmp_path / "stream", "hdf5", tmp_path / "same", **how, workers=1)
    assert report.counts.tokens_in == sum(truth_of(folder)["lengths"])
    assert sha256_of(tmp_path / "rows") == sha256_of(tmp_path / "same")
    run(convert_commands, "stream-to-hdf5", folder, tmp_path / "typed", "--seq-len", 64, "--batch-size", 4,
        "--packing", "best-fit", "--source-dtype", "uint16", code=0)  # fmt: skip
    assert sha256_of(tmp_path / "typed") == sha256_of(tmp_path / "same")


def test_a_boundary_token_cuts_documents(train, tmp_path):
    convert(train, "stream", tmp_path / "stream", boundary_token_id=7, source_dtype="uint16", workers=1)
    with open_corpus(tmp_path / "stream") as stream:
        np.testing.assert_array_equal(stream.tokens[0:3000], IDS)
        assert stream.document_count == np.count_nonzero(IDS == 7) + (IDS[-1] != 7)


def test_an_id_outside_of_the_vocabulary_proves_the_dtype_wrong(train, tmp_path):
    words = r"train\.bin.*: token id \d+ .* \(vocab_size 120\): source_dtype or vocab_size is another one$"
    how = {"vocab_size": 120, "seq_len": 50, "batch_size": 2, "source_dtype": "uint32", "workers": 1}
    is_refused(errors.ConvertError, lambda: convert(train, "hdf5", tmp_path / "out", **how), match=words)
    options = ("--vocab-size", 120, "--seq-len", 50, "--batch-size", 2, "--source-dtype", "uint32", "--workers", 1)
    message = one_error(run(convert_commands, train, tmp_path / "out", *options))
    assert message.endswith("--source-dtype or --vocab-size is another one")
    how = {"vocab_size": 120, "boundary_token_id": 7, "source_dtype": "uint32", "workers": 1}
    is_refused(errors.ConvertError, lambda: convert(train, "stream", tmp_path / "out", **how), match=words)
    olmo = GOLDEN / "olmo" / "uint16"
    how = {"vocab_size": 50_000, "seq_len": 50, "batch_size": 2, "source_dtype": "uint16", "workers": 1}
    words = "found 50,[0-9]+ at index .*: source_dtype or vocab_size is another one$"
    is_refused(errors.ConvertError, lambda: convert(olmo, "hdf5", tmp_path / "out", **how), match=words)
    how["vocab_size"] = 50_257
    convert(olmo, "hdf5", tmp_path / "out", **how)
    with open_reader(tmp_path / "out") as reader:
        assert reader.meta.vocab_size == 50_257


def test_conversions_need_the_dtype_too(train, tmp_path):
    shutil.copy(train, tmp_path / "array.npy")
    for path in (train, tmp_path / "array.npy"):
        message = one_error(run(convert_commands, path, tmp_path / "out", "--seq-len", 50))
        assert message.endswith("such as --source-dtype uint16")
    of_olmo = ("--from", "olmo", "--source-dtype", "uint16", "--seq-len", 50, "--packing", "best-fit")
    message = one_error(run(convert_commands, tmp_path / "array.npy", tmp_path / "out", *of_olmo))
    assert "pass --boundary-token-id, the token between them, or cut records: " in message
    line = f"zb convert {tmp_path / 'array.npy'} DST --to hdf5 --from bin --source-dtype uint16"
    assert message.endswith(line)
    typed = line.replace("DST", f"{tmp_path / 'out'} --seq-len 50 --batch-size 2")
    assert run(convert_commands, *typed.split()[2:]).exit_code == 0
    is_refused(
        errors.ArgumentError,
        lambda: convert(GOLDEN / "bin/gpt2", "hdf5", tmp_path / "out", source_dtype="uint16", seq_len=50),
        match="source_dtype is for files without a header, found 'bin'",
    )


def test_an_array_with_a_header_has_its_own_line_to_cut_records(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(800, dtype=np.uint16))
    stream = ("stream-to-hdf5", tmp_path / "a.npy", tmp_path / "out", "--seq-len", 50)
    message = one_error(run(convert_commands, *stream))
    line = f"zb convert {tmp_path / 'a.npy'} DST --to hdf5 --from npy"
    assert message.endswith(line)
    typed = line.replace("DST", f"{tmp_path / 'out'} --seq-len 50 --batch-size 2")
    assert run(convert_commands, *typed.split()[2:]).exit_code == 0


def test_a_conversion_goes_on_with_the_same_dtype_only(train, tmp_path):
    how = {"seq_len": 50, "batch_size": 2, "shards": 3, "workers": 1}
    with_dtype = lambda dtype, **more: convert(train, "hdf5", tmp_path / "out", source_dtype=dtype, **how, **more)  # noqa: E731
    is_refused(Stops, lambda: with_dtype("uint16", engine=Failing(1)))
    is_refused(errors.ZbError, lambda: with_dtype("int16", resume=True), match="same arguments")
    assert with_dtype("uint16", resume=True).kept.shards == 1
