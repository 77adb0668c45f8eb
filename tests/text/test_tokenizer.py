"""Tokenizers: the same ids whatever the library and the threads; digests; what is said when something is missing."""

import base64
import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from commandline import report_of, run_zb, succeed
from contract import is_refused
from hypothesis import example, given
from hypothesis import strategies as st
from processes import python

from zb_hdf5 import (
    ArgumentError,
    ConvertError,
    FormatError,
    Loader,
    StateError,
    TextLoader,
    UnavailableError,
    open_corpus,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.text import tokenizers
from zb_hdf5.text.byte_pairs import _merged_below, byte_characters
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.text.tokenizers import load_tokenizer, require_tokenizer
from zb_hdf5.text.training import _ranks as ranks_of
from zb_hdf5.text.training import train_tokenizer

tiktoken = pytest.importorskip("tiktoken")
pytest.importorskip("tokenizers")

TEXTS = [
    "",
    "Hello world 123456!\r\n\r\n",
    "<|endoftext|> is text",
    "naïve 東京 🙂\u00a0 x",
    "\ud800 alone",
    "'Ll 'ſ K",
]
STDLIB = Path(json.__file__).parent.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the report of a tokenizer that was trained on Python's own sources."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sources = sorted(STDLIB.glob("*.py"))[:60]
    return train_tokenizer(open_documents(sources, "text"), folder / "tok.json", 1000)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Return the report of one of other sources."""
    files = open_documents(sorted(STDLIB.glob("*.py"))[60:90], "text")
    return train_tokenizer(files, tmp_path_factory.mktemp("other") / "tok.json", 1000)


@pytest.fixture(scope="module", params=["byte", "tiktoken", "hf"])
def tokenizer(request, trained):
    specs = {"byte": "byte", "tiktoken": f"tiktoken:{trained.ranks_path}", "hf": f"hf:{alone(trained)}"}
    return load_tokenizer(specs[request.param])


def alone(trained):
    """Return the path of a copy of the JSON without the ranks beside it, which would encode in its place."""
    folder = trained.path.parent / "alone"
    folder.mkdir(exist_ok=True)
    return shutil.copy(trained.path, folder)


def test_training_reports_held_out_text_and_gives_ranks_that_can_be_decoded(trained):
    assert (trained.vocab_size, trained.documents, trained.held_out_documents) == (1000, 60, 3)
    assert 2 < trained.bytes_per_token < 6
    assert not trained.dropped.counts
    text = (STDLIB / "ast.py").read_text(encoding="utf-8")
    tokens, _ = load_tokenizer(f"tiktoken:{trained.ranks_path}").encode([text])
    ranks = [base64.b64decode(line.split()[0]) for line in trained.ranks_path.read_bytes().splitlines()]
    assert b"".join(ranks[token] for token in tokens) == text.encode()
    assert len(ranks) == 999


def digest_of(content, folder):
    (folder / "changed.json").write_text(json.dumps(content))
    return load_tokenizer(f"hf:{folder / 'changed.json'}").digest


def test_a_vocabulary_that_the_text_does_not_fill_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "b.txt").write_text("two three four")
    said = {}
    for size in (258, 400):
        command = ("tokenizer", "train", tmp_path, "-o", tmp_path / f"{size}.json", "--vocab-size", size)
        said[size] = " ".join(succeed(zb, *command).output.split())
    assert "tokens 258 trained" in said[258]
    found = json.loads((tmp_path / "400.json").read_text())
    count = len(found["model"]["vocab"]) + len(found["added_tokens"])
    assert count < 400
    assert f"tokens {count} of 400: each word of the text is one token by then" in said[400]


@given(st.lists(st.text(), max_size=5))
@example(TEXTS)
@example(["\x85\u2028\u2029\x1c\x1d \u3000", "ſ'ſ 'S 'ſt", "²³ Ⅷ १२३ ٣٤٥", "\u200b\u180e x", "a\u0301\u0302", "ŉǅ"])
def test_tiktoken_and_hugging_face_agree(trained, texts):
    fast, slow = (load_tokenizer(spec) for spec in (f"tiktoken:{trained.ranks_path}", f"hf:{alone(trained)}"))
    assert slow.encoder == "tok.json"
    for a, b in zip(fast.encode(texts), slow.encode(texts), strict=True):
        assert a.tolist() == b.tolist()
    assert fast.special_tokens == slow.special_tokens == {"<|endoftext|>": 999}
    assert fast.vocab_size == slow.vocab_size == 1000


RUNS = [" ", "\t", "\u3000", "\xa0", "\n", "\x85"]


@pytest.mark.parametrize("character", RUNS)
@pytest.mark.thin
def test_a_million_spaces_have_the_ids_of_the_slow_encoder(trained, character):
    text = f"def f():{character * 1_000_000}return 'x', 12345"
    fast, slow = (load_tokenizer(spec) for spec in (f"tiktoken:{trained.ranks_path}", f"hf:{alone(trained)}"))
    ids = fast.encode(text)
    assert np.array_equal(ids, slow.encode(text))
    assert np.array_equal(ids, load_tokenizer(f"hf:{trained.path}").encode([text, "a"], 2)[0][: len(ids)])
    assert fast.decode(ids) == text


@given(st.lists(st.text(), max_size=5))
@example(TEXTS)
@example(["\x85\u2028\u2029\x1c\x1d \u3000", "ſ'ſ 'S 'ſt", "²³ Ⅷ १२३ ٣٤٥", "\u200b\u180e x", "a\u0301\u0302", "ŉǅ"])
def test_texts_that_are_split_by_pieces_have_the_same_ids(trained, texts):
    fast = load_tokenizer(f"tiktoken:{trained.ranks_path}")
    for text in map(tokenizers.as_unicode, texts):
        assert tokenizers._ids_by_pieces(fast._encoding, text).tolist() == fast.encode(text).tolist()


def json_of(folder, model, name="tok.json", **more):
    """Write a tokenizer.json of a model, and return its path."""
    none = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    path = folder / name
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], **none, "model": model, **more}))
    return path


def model_of(kind, **more):
    """Return a model of the characters a and b, and of both together."""
    vocab = {"a": 0, "b": 1, "ab": 2}
    match kind:
        case "BPE":
            return {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], **more}
        case "Unigram":
            pairs = [[token, -1.0 - number] for number, token in enumerate(vocab)]
            return {"type": "Unigram", "vocab": pairs, "unk_id": None, "byte_fallback": False, **more}
        case "WordPiece":
            word = {"max_input_chars_per_word": 100, "continuing_subword_prefix": "##", "unk_token": "[UNK]"}
            return {"type": "WordPiece", "vocab": vocab, **word, **more}
    return {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]", **more}


@pytest.mark.parametrize(
    ("options", "stored"),
    [([], [0, 1, 4]), (["--no-boundary"], [0, 1]), (["--boundary-token", "<s>"], [0, 1, 3])],
)
def test_no_token_is_put_in_front_of_a_text(tmp_path, options, stored):
    """Not even by a tokenizer that puts a BOS there; the boundary token stands after each document."""
    library = pytest.importorskip("tokenizers")
    path = json_of(tmp_path, model_of("WordLevel"))
    whole = library.Tokenizer.from_file(str(path))
    whole.pre_tokenizer = library.pre_tokenizers.Whitespace()
    whole.add_special_tokens(["<s>", "<|endoftext|>"])
    whole.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    whole.save(str(path))
    assert whole.encode("a b").ids == [3, 0, 1]
    (tmp_path / "text.jsonl").write_text('{"text": "a b"}\n' * 3)
    words = ["--to", "stream", "--tokenizer", path, *options]
    succeed(zb, "convert", tmp_path / "text.jsonl", tmp_path / "stream", *words)
    with open_corpus(tmp_path / "stream") as corpus:
        assert [corpus.documents[number].ids.tolist() for number in range(3)] == [stored] * 3


@pytest.mark.parametrize("model", [
    model_of("BPE", dropout=0.5), model_of("Unigram", alpha=0.1, nbest_size=64), model_of("BPE", dropout=1.0),
])  # fmt: skip
def test_nothing_draws_lots(tmp_path, model):
    random = load_tokenizer(f"hf:{json_of(tmp_path, model)}")
    plain = load_tokenizer(f"hf:{json_of(tmp_path, model_of(model['type'], dropout=None), 'plain.json')}")
    assert {tuple(random.encode("ab" * 20)) for _ in range(50)} == {tuple(plain.encode("ab" * 20))}
    if model["type"] == "BPE":
        assert random.digest == plain.digest
        assert random.encode("ab").tolist() == [2]


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
IN_PARTS = {"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}
BYTES = {character: number for number, character in enumerate(sorted(byte_characters()))}
FALLBACK = {"a": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}


@pytest.mark.parametrize(("model", "more", "texts"), [
    (model_of("BPE"), {}, {"abba": 0, "a世b界": 2, "a b": 1, "": 0}),
    (model_of("BPE"), {"normalizer": {"type": "Lowercase"}}, {"ABBA": 0, "Ac": 1}),
    (model_of("BPE"), {"pre_tokenizer": {"type": "WhitespaceSplit"}}, {"ab ab\nb": 0, "a c": 1}),
    (model_of("BPE", end_of_word_suffix="."), {"pre_tokenizer": {"type": "WhitespaceSplit"}}, {"ab": 1, "ab a": 2}),
    (model_of("BPE", ignore_merges=True), {"pre_tokenizer": {"type": "WhitespaceSplit"}}, {"ab": 0, "abc": 1}),
    (model_of("BPE"), {"pre_tokenizer": BYTE_LEVEL}, {"ab": 0, "aü": 2}),
    (model_of("BPE", vocab={"a": 0, "<0x63>": 1}, merges=[], byte_fallback=True), {}, {"ac": 0, "aü": 1}),
    (model_of("BPE", vocab=BYTES, merges=[]), {"pre_tokenizer": BYTE_LEVEL}, None),
    (model_of("BPE", vocab=BYTES, merges=[]), {"pre_tokenizer": IN_PARTS}, None),
    (model_of("BPE", vocab=FALLBACK, merges=[], byte_fallback=True), {}, None),
    (model_of("BPE", unk_token="b"), {}, None),
])  # fmt: skip
def test_a_tokenizer_that_loses_characters_is_named_and_they_are_counted(tmp_path, capsys, model, more, texts):
    path = json_of(tmp_path, model, **more)
    lossy = load_tokenizer(str(path))
    told = f"note: {path}: has no unknown token and no tokens of bytes: characters that it has no token for are lost\n"
    assert capsys.readouterr().err == (told if texts else "")
    load_tokenizer(str(path))
    assert capsys.readouterr().err == ""
    for text, unknown in (texts or {"aü世b c": 0}).items():
        assert lossy.num_unknown(text) == unknown
        spelt = sum(len(lossy._tokenizer.id_to_token(number)) for number in lossy.encode(text).tolist())
        if more.keys() <= {"normalizer"} and not model.get("byte_fallback"):
            assert spelt + unknown == len(text)


@pytest.mark.parametrize("model", [model_of(kind) for kind in ("Unigram", "WordPiece", "WordLevel")] + [
    model_of("BPE", unk_token="<unk>"),
])  # fmt: skip
def test_a_text_that_a_tokenizer_refuses_is_an_error_of_its_own(tmp_path, capsys, model):
    path = json_of(tmp_path, model)
    strict = load_tokenizer(str(path))
    told = f"note: {path}: has no unknown token: documents with a text that it has no token for are dropped\n"
    assert capsys.readouterr().err == told
    found = strict.encode_each(["a", "c", "b"], 2)
    assert [each.tolist() for each in found[::2]] == [[0], [1]]
    assert isinstance(found[1], FormatError)
    for texts in ("c", ["a", "c"]):
        is_refused(FormatError, lambda texts=texts: strict.encode(texts), match=r"cannot encode a text of 1 characters")


def test_special_tokens_in_text_are_text_and_a_description_has_no_path(tokenizer):
    tokens, lengths = tokenizer.encode(TEXTS)
    assert tokenizer.boundary_token_id not in tokens
    assert lengths[0] == 0
    assert lengths.sum() == len(tokens)
    assert (tokens.dtype, lengths.dtype) == (np.uint32, np.int64)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32
        assert ids.tolist() == tokenizer.encode([text])[0].tolist()
    assert [len(part) for part in tokenizer.encode([], 2)] == [0, 0]
    if tokenizer.spec == "byte":
        tokens, lengths = tokenizer.encode(["aü", "", "\ud800"])
        assert (tokens.tolist(), lengths.tolist()) == ([97, 195, 188, 239, 191, 189], [3, 0, 3])
    assert set(tokenizer.description) == {"kind", "name", "vocab_size", "digest"}
    assert "/" not in json.dumps(tokenizer.description)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.description == tokenizer.description
    with pytest.raises(ArgumentError, match=r"no special token '<s>'; it has: <\|endoftext\|>"):
        tokenizer.special_token_id("<s>")
    assert tokenizer.special_token_id("<|endoftext|>") == tokenizer.boundary_token_id


def test_threads_do_not_change_the_ids(tokenizer):
    texts = [f"{number} {text}" * (number % 7) for number, text in enumerate(TEXTS * 9)]
    expected = tokenizer.encode(texts)
    for num_threads in (2, 3, 16):
        for found, wanted in zip(tokenizer.encode(texts, num_threads), expected, strict=True):
            assert np.array_equal(found, wanted)
    alone = [tokenizer.encode([text])[0] for text in texts]
    assert np.array_equal(np.concatenate(alone), expected[0])


@given(st.text())
@example("naïve 東京 🙂\u00a0 x <|endoftext|> a b\r\n\x00")
def test_decode_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_decode_spells_special_tokens_out_replaces_broken_bytes_and_refuses_what_is_no_row_of_ids(tokenizer):
    boundary = tokenizer.boundary_token_id
    row = [*tokenizer.encode("one").tolist(), boundary, *tokenizer.encode("two").tolist(), boundary]
    assert tokenizer.decode(np.array(row, np.uint16)) == "one<|endoftext|>two<|endoftext|>"
    cut = tokenizer.encode("\U00010348")  # rare: its four bytes are several tokens
    assert len(cut) > 1
    assert tokenizer.decode(cut[:-1]) == "\ufffd"
    assert tokenizer.decode([*cut[:-1].tolist(), boundary]) == "\ufffd<|endoftext|>"
    assert tokenizer.decode([]) == ""
    for bad in (tokenizer.vocab_size, -1, 2**40):
        with pytest.raises(ArgumentError, match=f"has no token {bad}; its ids are below {tokenizer.vocab_size:,}"):
            tokenizer.decode([0, bad])
    for bad in ([[0, 1], [2, 3]], [0.5], "text", 3):
        with pytest.raises(ArgumentError, match="decode needs one row of ids, found shape"):
            tokenizer.decode(bad)


def test_digest_follows_what_decides_the_ids(trained, tmp_path):
    json_path, ranks_path = tmp_path / "other.json", tmp_path / "other.tiktoken"
    content = json.loads(trained.path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    json_path.write_text(json.dumps(content))
    ranks_path.write_bytes(trained.ranks_path.read_bytes())
    hf = load_tokenizer(f"hf:{json_path}")
    assert hf.digest == trained.digest
    assert len(hf.encode(["one two three four"])[0]) > 3
    for path, kind in ((trained.path, "hf"), (trained.ranks_path, "tiktoken")):  # a path alone is a tokenizer
        assert load_tokenizer(str(path)).description == load_tokenizer(f"{kind}:{path}").description
        assert pickle.loads(pickle.dumps(load_tokenizer(str(path)))).digest == trained.digest
    before = load_tokenizer(f"tiktoken:{ranks_path}").digest
    assert before == load_tokenizer(f"tiktoken:{trained.ranks_path}").digest
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    json_path.write_text(json.dumps(content))
    assert load_tokenizer(f"hf:{json_path}").digest != trained.digest
    assert load_tokenizer(f"tiktoken:{ranks_path}").digest != before


def test_another_tokenizer_than_the_store_has_is_an_error(tokenizer, trained):
    other = load_tokenizer("byte" if tokenizer.spec != "byte" else f"hf:{trained.path}")
    stored = json.dumps(tokenizer.description)
    require_tokenizer(stored, tokenizer, "store")
    require_tokenizer("", tokenizer, "store")
    require_tokenizer('{"name": "something of which we know no digest"}', tokenizer, "store")
    for of_others in ("gpt2", '"gpt2"', "[1]", "3", '{"digest": 3}', "[" * 100_000):  # a writer may be given any text
        require_tokenizer(of_others, tokenizer, "store")
    with pytest.raises(
        StateError, match=r"store: expected the tokenizer that it was made with, \w+:.* found \w+.*; pass that"
    ):
        require_tokenizer(stored, other, "store")


def test_one_trained_tokenizer_has_one_digest(trained, other, tmp_path):
    """Under both of its names, after another program has written the JSON, and only while both give the same ids."""
    fast, slow = load_tokenizer(f"tiktoken:{trained.ranks_path}"), load_tokenizer(f"hf:{trained.path}")
    assert fast.digest == slow.digest == trained.digest
    for stored, found in ((fast, slow), (slow, fast)):
        require_tokenizer(json.dumps(stored.description), found, "store")
    content = json.loads(trained.path.read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]  # as older versions wrote it
    processor = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    content["post_processor"] = processor
    assert digest_of(content, tmp_path) == trained.digest
    assert other.digest != trained.digest
    with pytest.raises(StateError, match=r"expected the tokenizer that it was made with, tiktoken:tok\.tiktoken"):
        require_tokenizer(json.dumps(fast.description), f"hf:{other.path}", "store")


def test_both_names_open_a_store_and_text_and_their_states_move(trained, other, tmp_path):
    (tmp_path / "text").mkdir()
    lines = "".join(json.dumps({"text": path.read_text()[:3000]}) + "\n" for path in sorted(STDLIB.glob("*.py"))[:40])
    (tmp_path / "text" / "a.jsonl").write_text(lines)
    fast, slow = f"tiktoken:{trained.ranks_path}", f"hf:{trained.path}"
    for name, spec in (("fast", fast), ("slow", slow)):
        shape = ["--batch-size", 4, "--seq-len", 64, "--packing", "best-fit"]
        succeed(convert, "jsonl-to-hdf5", tmp_path / "text", tmp_path / name, "--tokenizer", spec, *shape)
    how = {"rank": 0, "world_size": 1}
    with Loader(tmp_path / "fast", tokenizer=slow, **how) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        expected = [batch.tolist() for batch in batches]
    for name, spec in (("fast", fast), ("slow", fast), ("slow", slow)):
        with Loader(tmp_path / name, tokenizer=spec, **how) as loader:
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == expected
    for spec in (f"hf:{other.path}", f"tiktoken:{other.ranks_path}", "byte"):
        with pytest.raises(StateError, match=r"tokenizer .* tiktoken:tok\.tiktoken"):
            Loader(tmp_path / "fast", tokenizer=spec, **how)
    table, parquet = pytest.importorskip("pyarrow").table, pytest.importorskip("pyarrow.parquet")
    texts = [path.read_text() for path in sorted(STDLIB.glob("*.py"))[:10]]
    for name in "ab":
        parquet.write_table(table({"text": texts}), tmp_path / f"{name}.parquet")
    how = {"batch_size": 2, "seq_len": 64, "rank": 0, "world_size": 1}
    with TextLoader(tmp_path, tokenizer=f"tiktoken:{trained.ranks_path}", **how) as loader:
        loader.get_batch()
        state = loader.state_dict()
        expected = loader.get_batch().tolist()
    with TextLoader(tmp_path, tokenizer=f"hf:{trained.path}", **how) as loader:
        loader.load_state_dict(state)
        assert loader.get_batch().tolist() == expected
    with TextLoader(tmp_path, tokenizer="byte", **how) as loader, pytest.raises(StateError, match="has tokenizer"):
        loader.load_state_dict(state)


def test_ranks_beside_a_json_encode_in_its_place_only_if_both_have_one_digest(trained, other, tmp_path):
    texts = [path.read_text(encoding="utf-8") + "<|endoftext|>" for path in sorted(STDLIB.glob("*.py"))[60:70]]
    fast, slow = load_tokenizer(f"hf:{trained.path}"), load_tokenizer(f"hf:{alone(trained)}")
    assert (fast.encoder, slow.encoder) == ("tok.tiktoken", "tok.json")
    assert fast.description == slow.description
    assert fast.special_tokens == slow.special_tokens
    for found, expected in zip(fast.encode(texts, 2), slow.encode(texts, 2), strict=True):
        np.testing.assert_array_equal(found, expected)
    ids = fast.encode(texts[0])
    assert fast.decode(ids) == slow.decode(ids) == texts[0]
    path = shutil.copy(trained.path, tmp_path)
    for ranks in (other.ranks_path.read_bytes(), b"", trained.ranks_path.read_bytes()[:-9], b"!! 3"):
        (tmp_path / "tok.tiktoken").write_bytes(ranks)
        again = load_tokenizer(f"hf:{path}")
        assert (again.encoder, again.digest) == ("tok.json", slow.digest)
        np.testing.assert_array_equal(again.encode(texts[0]), ids)


def test_the_report_names_the_file_that_encodes_and_the_store_its_tokenizer(trained, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 99)
    for name, path, encoder in (("fast", trained.path, "tok.tiktoken"), ("slow", alone(trained), None)):
        shape = ("--batch-size", 2, "--seq-len", 16, "--packing", "concat", "--tokenizer", path)
        report = report_of(convert, "text-to-hdf5", tmp_path / "a.txt", tmp_path / name, *shape)
        assert report.get("encoder") == encoder
    [fast, slow] = [sorted((tmp_path / name).glob("*.h5")) for name in ("fast", "slow")]
    assert [path.read_bytes() for path in fast] == [path.read_bytes() for path in slow]
    assert (tmp_path / "fast/shards.json").read_bytes() == (tmp_path / "slow/shards.json").read_bytes()


@pytest.mark.parametrize("change", ["merges", "matched", "byte", "special", "normalizer"])
def test_a_tokenizer_that_ranks_cannot_express_has_its_own_digest(trained, tmp_path, change):
    content = json.loads(trained.path.read_text())
    model = content["model"]
    if change == "merges":  # the ids of the merged tokens no longer ascend: other merges come first
        model["merges"][3:5] = model["merges"][4:2:-1]
    elif change == "matched":  # an added token that is found in texts
        content["added_tokens"].append({**content["added_tokens"][0], "id": 1000, "content": "def", "special": False})
    elif change == "byte":
        model["vocab"].pop("A")
        model["merges"] = [pair for pair in model["merges"] if "A" not in "".join(pair)]
    elif change == "special":
        content["added_tokens"][0]["content"] = "<|end|>"
    else:
        content["normalizer"] = {"type": "Lowercase"}
    assert digest_of(content, tmp_path) != trained.digest


def test_a_merge_that_ranks_would_do_otherwise_has_its_own_digest(trained, tmp_path):
    """`abc` is listed as a + bc; by ranks `ab` comes first, and leaves `c`."""
    content = json.loads(trained.path.read_text())
    model = content["model"]
    base = {token: number for token, number in model["vocab"].items() if len(token) == 1}
    assert len(base) == 256
    model["vocab"] = base | {"ab": 256, "bc": 257, "abc": 258}
    content["added_tokens"][0]["id"] = 259
    model["merges"] = [["a", "b"], ["b", "c"], ["ab", "c"]]
    agreeing = digest_of(content, tmp_path)
    assert load_tokenizer(f"hf:{tmp_path / 'changed.json'}").encode("abc").tolist() == [258]
    (tmp_path / "changed.tiktoken").write_bytes(ranks_of(model["vocab"]))
    assert load_tokenizer(f"tiktoken:{tmp_path / 'changed.tiktoken'}").digest == agreeing
    model["merges"][2] = ["a", "bc"]
    assert digest_of(content, tmp_path) != agreeing
    assert load_tokenizer(f"hf:{tmp_path / 'changed.json'}").encode("abc").tolist() == [256, base["c"]]
    ranks = load_tokenizer(f"tiktoken:{tmp_path / 'changed.tiktoken'}")
    assert (ranks.digest, ranks.encode("abc").tolist()) == (agreeing, [258])


@pytest.mark.parametrize(("spec", "kind", "message"), [
    ("gpt2", ArgumentError, "'gpt2': expected byte, a tokenizer.json, a file of ranks .tiktoken, or tiktoken:NAME"),
    ("tiktoken:", ArgumentError, "expected byte"),
    ("tiktoken:nonsense", ArgumentError, "no such file, and no encoding of tiktoken: .*cl100k_base"),
    ("tiktoken:{tmp}/alone.tiktoken", ArgumentError, "expected alone.json in the same folder"),
    ("hf:gpt2", ArgumentError, "hf:gpt2: expected a tokenizer.json .* are not looked up; .* make one with train_tok"),
    ("nothing.json", ArgumentError, "nothing.json: expected a tokenizer.json of this machine, found none"),
    ("tiktoken:{tmp}/bad.json", ArgumentError, r"bad\.json': expected byte, a tokenizer\.json, a file of ranks"),
    ("tiktoken:{tmp}/bad.tiktoken", FormatError, "not a file of ranks that goes with bad.json"),
    ("tiktoken:{tmp}/hole.tiktoken", FormatError, r"hole\.tiktoken: not a file of ranks that goes with hole\.json"),
    ("tiktoken:{tmp}/words.tiktoken", FormatError, "splits or normalizes text in a way that tiktoken has not"),
    ("hf:{tmp}/alone.tiktoken", FormatError, "not a tokenizer.json"),
    ("hf:{tmp}/empty.json", FormatError, "it has no 'model'"),
    ("hf:{tmp}/model.json", FormatError, "not a tokenizer.json"),
    ("hf:{tmp}/untrained.json", FormatError, r"untrained\.json: expected a trained tokenizer, found no tokens"),
])  # fmt: skip
def test_error_messages(trained, tmp_path, spec, kind, message):
    content = json.loads(trained.path.read_text())
    (tmp_path / "alone.tiktoken").write_bytes(trained.ranks_path.read_bytes())
    lines = trained.ranks_path.read_bytes().splitlines(keepends=True)
    (tmp_path / "hole.tiktoken").write_bytes(b"".join(lines[:100] + lines[101:]))
    (tmp_path / "hole.json").write_bytes(trained.path.read_bytes())
    (tmp_path / "bad.tiktoken").write_bytes(b"no ranks at all")
    (tmp_path / "bad.json").write_text(json.dumps(content))
    (tmp_path / "words.tiktoken").write_bytes(trained.ranks_path.read_bytes())
    (tmp_path / "words.json").write_text(json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "model.json").write_text('{"model": {"type": "nonsense"}}')
    untrained = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    (tmp_path / "untrained.json").write_text(json.dumps(content | untrained))
    with pytest.raises(kind, match=message):
        load_tokenizer(spec.format(tmp=tmp_path))


def test_training_shows_progress_in_a_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("zb_hdf5.console.LOG_INTERVAL_S", 0.0)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{k} of many"}) + "\n" for k in range(40)))
    arguments = ("tokenizer", "train", tmp_path / "text.jsonl", "--vocab-size", 260, "-o", tmp_path / "t.json")
    shown = run_zb(*arguments).stderr
    assert shown.startswith("training: ")
    assert shown.count("B/s") >= 2
    assert capfd.readouterr() == ("", "")  # the library draws its own bars on a terminal only


def test_a_name_without_a_network_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match=r"could not be downloaded .*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("tiktoken:r50k_base")


@pytest.mark.parametrize(("package", "spec"), [("tiktoken", "tiktoken:gpt2"), ("tokenizers", "hf:{path}")])
def test_a_missing_library_is_named(trained, package, spec):
    spec = spec.format(path=trained.path)
    code = f"""
import sys
sys.modules[{package!r}] = None
from zb_hdf5 import UnavailableError
from zb_hdf5.text.tokenizers import load_tokenizer
try:
    load_tokenizer({spec!r})
except UnavailableError as error:
    print(error)
"""
    done = python(code, check=True)
    assert done.stdout == f"this needs the package {package}: pip install 'zb_hdf5[text]'\n"


def test_training_errors(tmp_path):
    (tmp_path / "one.txt").write_text("one document")
    files = open_documents([tmp_path / "one.txt"])
    with pytest.raises(ArgumentError, match=r"expected a name that ends in \.json"):
        train_tokenizer(files, tmp_path / "tok.tiktoken", 300)
    with pytest.raises(ArgumentError, match="vocab_size must be at least 257, found 256"):
        train_tokenizer(files, tmp_path / "tok.json", 256)
    with pytest.raises(ConvertError, match="at least 2 documents to train on, found 1"):
        train_tokenizer(files, tmp_path / "tok.json", 300)
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    (tmp_path / "tok.tiktoken").write_text("mine")
    with pytest.raises(ConvertError, match=r"tok\.tiktoken: exists already"):
        train_tokenizer(files, tmp_path / "tok.json", 300)


def test_training_stops_where_most_lines_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab ab"}\n{"text": "ab"}\nbad\nbad\nbad\n')
    expected = r"expected at most 50% of the lines, rows or files to be dropped, found 3 of 5 \(3 bad JSON\)"
    with pytest.raises(ConvertError, match=expected):
        train_tokenizer(tmp_path, tmp_path / "tok.json", 257)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert train_tokenizer(tmp_path, tmp_path / "tok.json", 257, max_dropped=0.6).documents == 2


def test_a_vocabulary_of_bytes_a_small_corpus_and_lone_surrogates_as_they_are_encoded(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab ab"}\n{"text": "ab"}\nbad\n')
    report = train_tokenizer(open_documents([tmp_path]), tmp_path / "tok.json", 257)
    assert (report.vocab_size, report.bytes_per_token) == (257, 1.0)
    assert report.dropped.counts == {"bad JSON": 1}
    report = train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "tok.json", 5000, overwrite=True)
    assert (report.documents, report.vocab_size < 300) == (2, True)
    for name, odd in (("b", "\\ud800"), ("c", "\\ufffd")):
        lines = [f'{{"text": "{text}"}}\n' for text in ("one", f"{odd} two", f"{odd} three")]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    report, expected = (train_tokenizer(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.json", 270) for name in "bc")
    assert (report.documents, report.digest) == (3, expected.digest)


@pytest.mark.parametrize("paths", [[""], ["a_train.jsonl", "b-train.txt", "val"]], ids=["folder", "files"])
def test_a_corpus_with_splits_is_trained_on_by_its_split_for_training(tmp_path, capfd, paths):
    corpus = tmp_path / "corpus"
    (corpus / "val").mkdir(parents=True)
    (corpus / "a_train.jsonl").write_text('{"text": "some words to train on"}\n' * 30)
    (corpus / "b-train.txt").write_text("one document")
    (corpus / "val/c.jsonl").write_text('{"text": "others to look at"}\n' * 7)
    chosen = [corpus / path for path in paths]
    how = {"path": tmp_path / "tok.json", "vocab_size": 300, "overwrite": True}
    assert train_tokenizer(chosen, **how).documents == 31
    assert capfd.readouterr().err.endswith("only the files of the split train are read; others: val (1 file)\n")
    assert train_tokenizer(chosen, **how, split="val").documents == 7
    assert train_tokenizer(chosen, **how, split=None).documents == 38
    options = ("--vocab-size", 300, "-o", tmp_path / "tok.json", "--force")
    for split, documents in {(): 31, ("--split", "val"): 7, ("--split", "all"): 38}.items():
        report = report_of(zb, "tokenizer", "train", *chosen, *options, *split)
        assert (report["documents"], "files_left_out" in report) == (documents, False)


def test_a_corpus_whose_names_tell_some_splits_is_no_training_text(tmp_path):
    for name in ("train", "val", "more"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some words"}\n' * 9)
    options = ("--vocab-size", 300, "-o", tmp_path / "tok.json")
    for words in ((), ("--split", "val")):
        failed = run_zb("tokenizer", "train", tmp_path, *options, *words, code=2)
        assert "more.jsonl: expected a name that tells" in failed.stderr
        assert "pass --split all to read all as one" in failed.stderr


def merged_step_by_step(token, ranks):
    """Merge the bytes of a token, and look at all pairs again after each merge."""
    parts = [token[k : k + 1] for k in range(len(token))]
    while True:
        found = [(ranks[left + right], k) for k, (left, right) in enumerate(pairwise(parts)) if left + right in ranks]
        rank, k = min(found, default=(ranks[token], 0))
        if rank >= ranks[token]:
            return tuple(parts)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]


@given(st.lists(st.text("ab", min_size=1, max_size=9).map(str.encode), min_size=1, max_size=60, unique=True))
def test_the_parts_of_a_token_are_those_of_a_merge_step_by_step(tokens):
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for token in tokens:
        assert _merged_below(token, ranks) == merged_step_by_step(token, ranks)
