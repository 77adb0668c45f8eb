"""Wrong arguments: each is an error of ours with the value, and no error of Python's from inside."""

import json
import os
import pickle

import numpy as np
import pytest
from commandline import one_error, run_zb
from contents import batches_of
from contract import assert_same, is_refused, random_tokens, taken

import zb_hdf5
from zb_hdf5 import (
    Cache,
    DocumentLoader,
    FollowingLoader,
    HDF5ShardWriter,
    Loader,
    MixedLoader,
    ReadAs,
    StoreRecords,
    TextLoader,
    convert,
    errors,
    open_corpus,
    open_reader,
    open_writer,
    rebuild_index,
    repair,
    verify_store,
)
from zb_hdf5.compat import RustBPETokenizer, SlidingWindowDataloader, write_batch_file

ONE_RANK = {"rank": 0, "world_size": 1}
TEXT = {"tokenizer": "byte", "batch_size": 1, "seq_len": 8}
#: Everything that takes the path of data: name -> call.
OPENERS = {
    "Loader": Loader,
    "open_reader": open_reader,
    "FollowingLoader": FollowingLoader,
    "DocumentLoader": lambda path: DocumentLoader(path, batch_size=1, collate="pad"),
    "MixedLoader": lambda path: MixedLoader({"a": path}, {"a": 1.0}),
    "TextLoader": lambda path: TextLoader(path, **TEXT),
    "open_corpus": open_corpus,
    "windows": lambda path: open_reader(path, batch_size=1, seq_len=8),
    "convert": lambda path: convert(path, "hdf5", "out", source_format="hdf5"),
    "verify_store": verify_store,
    "repair": repair,
    "rebuild_index": rebuild_index,
}
WRITERS = {
    "open_writer": lambda path: open_writer(path, batch_size=1, seq_len=8),
    "HDF5ShardWriter": HDF5ShardWriter,
    "destination": lambda path: convert("in.npy", "hdf5", path),
    "cache": lambda path: Loader("in.h5", cache=path, **ONE_RANK),
}


@pytest.fixture
def place(tmp_path, monkeypatch, write_file):
    """Make the current folder one with a file of batches and an array."""
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", np.arange(96, dtype="<u2"))
    write_file(tmp_path / "in.h5", random_tokens(6, 2, 8))
    return tmp_path


@pytest.mark.parametrize("wrong", [["a", "b"], None, 7, {"a": 1}], ids=repr)
@pytest.mark.parametrize("name", [*OPENERS, *WRITERS])
def test_what_is_no_path_is_named(name, wrong, place):
    if (name, wrong) in (("cache", None), ("convert", ["a", "b"])):  # no cache; several sources
        return
    call = (OPENERS | WRITERS)[name]
    with pytest.raises(errors.ArgumentError) as raised:
        call(wrong)
    assert repr(wrong) in str(raised.value)
    assert sorted(os.listdir()) == ["in.h5", "in.npy"]


def test_several_stores_are_for_a_mixture():
    is_refused(errors.ArgumentError, lambda: Loader(["a", "b"]), match="a MixedLoader reads several stores")
    is_refused(errors.ArgumentError, lambda: MixedLoader(["a"], [1.0]), match="sources must map names to stores")


def test_a_path_may_be_bytes(place):
    np.testing.assert_array_equal(batches_of(b"in.h5"), random_tokens(6, 2, 8))


@pytest.mark.parametrize("name", [name for name in OPENERS if name not in ("verify_store", "repair", "rebuild_index")])
@pytest.mark.parametrize("path", ["nope", "nope.h5", "no/such/folder", "nope/shards.json"])
def test_a_path_that_is_not_there_is_named_with_its_folder(name, path, place):
    with pytest.raises(errors.ZbError) as raised:
        OPENERS[name](path)
    assert isinstance(raised.value, FileNotFoundError)
    assert raised.value.exit_code == 2
    assert str(raised.value) == f"{path}: there is no such file or folder in {place}; look for a mistake in the path"
    absolute = place / path
    with pytest.raises(errors.NotFoundError, match=f"^{absolute}: there is no such file or folder; look"):
        OPENERS[name](absolute)


def test_names_that_only_add_a_suffix_are_shown_for_a_path_that_is_not_there(place):
    for name in ("corpus.bin", "corpus.npy", "corpus2.bin"):  # .bin and .idx would make the name a prefix
        (place / name).touch()
    with pytest.raises(errors.NotFoundError, match=f"in {place}, but corpus.bin and corpus.npy; look for a mistake"):
        zb_hdf5.Loader("corpus")


def test_a_source_of_text_that_is_not_there_is_named(place):
    for source in ("nope", ["a/b.jsonl"]):
        with pytest.raises(errors.NotFoundError, match="there is no such file or folder in "):
            zb_hdf5.train_tokenizer(source, "tok.json", 300)


def test_a_file_that_is_still_written_is_named(place):
    with open_writer("busy.h5", batch_size=1, seq_len=8):
        told = r"busy.h5.partial .* is being written.*; if no writer is at work on it, repair it"
        for call in (Loader, open_reader, open_corpus):
            with pytest.raises(errors.NotFoundError, match=told):
                call("busy.h5")


SEEDED = {
    "global": lambda seed: next(Loader("in.h5", seed=seed, **ONE_RANK)),
    "records": lambda seed: next(Loader("in.h5", seed=seed, shuffle="records", **ONE_RANK)),
    "block": lambda seed: next(Loader("in.h5", seed=seed, shuffle="block", **ONE_RANK)),
    "sequential": lambda seed: next(Loader("in.h5", seed=seed, shuffle="sequential", **ONE_RANK)),
    "mixture": lambda seed: next(MixedLoader({"a": "in.h5"}, {"a": 1.0}, seed=seed, **ONE_RANK)),
    "documents": lambda seed: DocumentLoader("stream.h5", batch_size=1, collate="pad", seed=seed, **ONE_RANK),
    "windows": lambda seed: SlidingWindowDataloader(open_corpus("in.npy"), 8, batch_size=2, seed=seed),
    "open_writer": lambda seed: open_writer("o.h5", batch_size=1, seq_len=8, seed=seed, overwrite=True).close(),
    "write_batch_file": lambda seed: write_batch_file(
        "o.batch", np.ones((8, 8), "u4"), 2, 8, seed=seed, overwrite=True
    ),
    "convert": lambda seed: convert(
        "in.npy", "hdf5", "c.h5", seq_len=8, batch_size=2, seed=seed, workers=1, force=True
    ),
}


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.thin
def test_a_seed_is_a_whole_number(name, place):
    with HDF5ShardWriter("stream.h5") as writer:
        writer.write_documents(np.arange(96), [48, 48])
        writer.finish()
    for wrong in ("x", 1.5, [1]):
        with pytest.raises(errors.ArgumentError, match="seed") as raised:
            SEEDED[name](wrong)
        assert repr(wrong) in str(raised.value)
    SEEDED[name](np.int64(4))  # which is one


NUMBERS = {
    "set_epoch": lambda wrong: Loader("in.h5", **ONE_RANK).set_epoch(wrong),
    "rank": lambda wrong: Loader("in.h5", rank=wrong, world_size=2),
    "world_size": lambda wrong: Loader("in.h5", rank=0, world_size=wrong),
    "batch_size": lambda wrong: Loader("in.h5", batch_size=wrong, **ONE_RANK),
    "seq_len": lambda wrong: Loader("in.h5", seq_len=wrong, **ONE_RANK),
    "max_tokens": lambda wrong: DocumentLoader("stream.h5", collate="pack", max_tokens=wrong, **ONE_RANK),
    "pad_token_id": lambda wrong: DocumentLoader(
        "stream.h5", collate="pad", batch_size=1, pad_token_id=wrong, **ONE_RANK
    ),
    "batch_size of documents": lambda wrong: DocumentLoader("stream.h5", collate="pad", batch_size=wrong, **ONE_RANK),
    "batch_size of a stream": lambda wrong: Loader("in.npy", batch_size=wrong, seq_len=8, **ONE_RANK),
    "seq_len of a stream": lambda wrong: Loader("in.npy", batch_size=2, seq_len=wrong, targets=True, **ONE_RANK),
    "batch_size of a reader": lambda wrong: open_reader("in.npy", batch_size=wrong, seq_len=8),
    "batch_size of stored batches": lambda wrong: open_reader("in.h5", batch_size=wrong),
    "seq_len of a reader": lambda wrong: open_reader("in.npy", batch_size=2, seq_len=wrong, overlap=1),
    "overlap": lambda wrong: open_reader("in.npy", batch_size=2, seq_len=8, overlap=wrong),
    "overlap of stored batches": lambda wrong: open_reader("in.h5", overlap=wrong),
    "batch_size of a corpus": lambda wrong: open_corpus("in.npy").batches(wrong, 8),
    "batch_size of rows": lambda wrong: open_corpus("rows.npy").batches(wrong),
    "seq_len of a corpus": lambda wrong: open_corpus("in.npy").batches(2, wrong),
    "stride": lambda wrong: open_corpus("in.npy").batches(2, 8, wrong),
    "seq_len of records": lambda wrong: StoreRecords("in.h5", seq_len=wrong),
    "batch_size of a mixture": lambda wrong: MixedLoader(
        {"a": "in.npy"}, {"a": 1.0}, batch_size=wrong, seq_len=8, **ONE_RANK
    ),
}


@pytest.fixture
def numbered(place):
    """Make the current folder one with a stream of documents and rows, too."""
    np.save("rows.npy", np.arange(96, dtype="<u2").reshape(-1, 8))
    with HDF5ShardWriter("stream.h5") as writer:
        writer.write_documents(np.arange(96), [48, 48])
        writer.finish()
    return place


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", ["x", 1.5, True], ids=repr)
def test_a_number_is_a_whole_number(name, wrong, numbered):
    with pytest.raises(errors.ArgumentError, match=f"must be a whole number, found {wrong!r}$") as raised:
        NUMBERS[name](wrong)
    assert str(raised.value).split()[0] == name.removeprefix("set_").split()[0]


@pytest.mark.parametrize("make", [
    lambda n: Loader("in.npy", batch_size=n(2), seq_len=n(8), **ONE_RANK),
    lambda n: Loader("in.npy", batch_size=n(2), seq_len=n(8), shuffle="records", targets=True, **ONE_RANK),
    lambda n: Loader("rows.npy", batch_size=n(2), seq_len=n(4), **ONE_RANK),
    lambda n: Loader("in.h5", batch_size=n(4), rank=n(1), world_size=n(2)),
    lambda n: MixedLoader({"a": "in.h5"}, {"a": 1.0}, batch_size=n(4), seq_len=n(4), **ONE_RANK),
    lambda n: Loader(open_corpus("in.npy").batches(n(2), n(8), n(4)), **ONE_RANK),
    lambda n: Loader(open_reader("in.npy", batch_size=n(2), seq_len=n(8), overlap=n(1)), **ONE_RANK),
    lambda n: DocumentLoader("stream.h5", collate=("pad", n(64)), batch_size=n(1), **ONE_RANK),
    lambda n: DocumentLoader("stream.h5", collate="pad", batch_size=n(1), shuffle=("lengths", n(1)), **ONE_RANK),
    lambda n: DocumentLoader("stream.h5", collate="pack", max_tokens=(n(16), "truncate"), **ONE_RANK),
])  # fmt: skip
@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_a_number_of_numpy_is_the_number(make, kind, numbered):
    with make(kind) as found, make(int) as expected:
        assert repr(found) == repr(expected)
        assert_same(taken(found, 1), taken(expected, 1))
        assert json.loads(json.dumps(found.state_dict())) == expected.state_dict()


def test_true_is_no_number_of_bytes(tmp_path):
    for name, call in {
        "skip_bytes": lambda: ReadAs(source_dtype="uint16", skip_bytes=True),
        "max_bytes": lambda: Cache(tmp_path, True),
    }.items():
        with pytest.raises(errors.ArgumentError, match=f"^{name} must be a whole number of at least ., found True$"):
            call()


def test_a_numpy_seed_gives_the_order_of_the_number(place):
    seed = 2**40 + 1
    with Loader("in.h5", seed=np.int64(seed), **ONE_RANK) as one, Loader("in.h5", seed=seed, **ONE_RANK) as two:
        assert [batch.tolist() for batch in one] == [batch.tolist() for batch in two]
        assert one.state_dict() == two.state_dict()
        json.dumps(one.state_dict())


# --- folders that are not stores ------------------------------------------------------------------------------------
def test_a_folder_that_is_no_store_is_named_with_its_content(place):
    (place / "corpus").mkdir()
    for name in ("a.jsonl", "b.jsonl", "notes.txt"):
        (place / "corpus" / name).write_text('{"text": "a"}\n')
    is_refused(
        errors.FormatError,
        lambda: Loader("corpus"),
        lambda: open_reader("corpus"),
        match="^corpus: has text or rows, which are not read in place; its text, in column 'text': "
        r"convert\('corpus', 'stream', 'DST', tokenizer='byte'\)$",
    )
    (place / "empty").mkdir()
    is_refused(errors.FormatError, lambda: Loader("empty"), match="not a store, but an empty folder")
    (place / "data").mkdir()
    convert("in.npy", "hdf5", "data/train", seq_len=8, batch_size=2, shards=2, workers=1)
    is_refused(errors.FormatError, lambda: Loader("data"), match="not a store, but a folder with the store train; ")


# --- JSON lines without the text -----------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_the_keys_that_are_there_are_named(suffix, place):
    import gzip

    lines = b"".join(b'{"id": "%d", "content": "some text"}\n' % number for number in range(2000))
    (place / f"a{suffix}").write_bytes(gzip.compress(lines) if suffix.endswith("gz") else lines)
    convert_it = ("convert", "jsonl-to-hdf5", f"a{suffix}", "out", "--tokenizer", "byte", "--seq-len", 16)
    expected = "(no key 'text' in its lines); pass --text-column with one of their keys: id, content"
    assert one_error(run_zb(*convert_it), 1).endswith(expected)
    assert one_error(run_zb("tokenizer", "train", f"a{suffix}", "-o", "tok.json"), 1).endswith(expected)
    with pytest.raises(errors.ConvertError, match=r"pass text_column= with one of their keys: id, content$"):
        convert(f"a{suffix}", "hdf5", "out", tokenizer="byte", seq_len=16)
    assert run_zb(*convert_it, "--text-column", "content").exit_code == 0


def test_a_damaged_file_is_named_before_its_keys_are(place):
    (place / "a.jsonl.gz").write_bytes(b"no gzip")
    is_refused(
        errors.FormatError,
        lambda: convert("a.jsonl.gz", "hdf5", "out", tokenizer="byte", seq_len=16),
        match="a.jsonl.gz: damaged or cut off: ",
    )


def test_a_file_with_the_key_in_some_lines_is_converted(place):
    (place / "a.jsonl").write_text('{"content": "none"}\n' * 5 + '{"text": "some text of a document"}\n')
    (place / "b.jsonl").write_text('{"content": "none"}\n' * 5)
    options = {"tokenizer": "byte", "seq_len": 4, "batch_size": 1, "max_dropped": 0.95}
    assert convert(["b.jsonl", "a.jsonl"], "hdf5", "out", **options).num_batches


# --- states of other stores ----------------------------------------------------------------------------------------
def test_a_state_of_another_store_is_told_before_its_shape_is(place, write_file):
    write_file(place / "other.h5", random_tokens(9, 4, 6))
    with Loader("other.h5", **ONE_RANK) as loader, MixedLoader({"a": "other.h5"}, {"a": 1.0}, **ONE_RANK) as mixed:
        states = {"state.json": loader.state_dict(), "mixed.json": mixed.state_dict()}
    with Loader("in.npy", batch_size=2, seq_len=6, **ONE_RANK) as loader:
        states["stream.json"] = loader.state_dict()
    for name, state in states.items():
        (place / name).write_text(json.dumps(state))
    for store, name, named in (
        ("in.h5", "state.json", "in.h5"), ("a=in.h5", "mixed.json", "in.h5"), ("in.h5", "stream.json", "in.h5"),
        ("in.npy", "state.json", "in.npy"),
    ):  # fmt: skip
        message = one_error(run_zb("which", store, "--state", name, "--step", 0), 1)
        assert message.startswith(f"{name}: the state names another store than {named}: "), message
    assert run_zb("which", "other.h5", "--state", "state.json", "--step", 0).exit_code == 0
    assert run_zb("which", "in.npy", "--state", "stream.json", "--step", 0).exit_code == 0


# --- the tokenizer of the streaming pipeline -----------------------------------------------------------------------
def bytes_and_bos():
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([each]): each for each in range(256)}
    return tiktoken.Encoding("mine", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|bos|>": 256})


def test_an_encoding_of_tiktoken_is_taken_as_the_seed_takes_it():
    encoding = bytes_and_bos()
    tokenizer = RustBPETokenizer(encoding, "<|bos|>")
    assert (tokenizer.bos_token_id, tokenizer.get_bos_token_id(), tokenizer.vocab_size) == (256, 256, 257)
    assert tokenizer.enc is encoding
    assert tokenizer.encode("ab <|bos|>", prepend="<|bos|>", append=7) == [256, *b"ab <|bos|>", 7]
    assert tokenizer.encode(["a", "", "bc"], prepend=256, num_threads=2) == [[256, 97], [256], [256, 98, 99]]
    assert tokenizer.decode([256, 97]) == "<|bos|>a"
    assert pickle.loads(pickle.dumps(tokenizer)).encode("ab") == [97, 98]
    is_refused(errors.ArgumentError, lambda: tokenizer.encode_special("<|eos|>"), match="no special token '<|eos|>'")
    for wrong in (7, None, ["byte"]):
        is_refused(errors.ArgumentError, lambda wrong=wrong: RustBPETokenizer(wrong), match="tiktoken.Encoding")


def test_an_encoding_has_the_digest_of_its_file_of_ranks(tmp_path):
    pytest.importorskip("tokenizers")
    from zb_hdf5.text.text_corpus import open_documents
    from zb_hdf5.text.tokenizers import EncodingTokenizer, TiktokenTokenizer

    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("the text that a tokenizer is trained on " * 50)
    zb_hdf5.train_tokenizer(open_documents([tmp_path]), tmp_path / "tok.json", 300)
    by_file = zb_hdf5.load_tokenizer(str(tmp_path / "tok.tiktoken"))
    assert isinstance(by_file, TiktokenTokenizer)
    by_object = EncodingTokenizer(by_file._encoding)
    assert (by_object.digest, by_object.special_tokens) == (by_file.digest, by_file.special_tokens)
