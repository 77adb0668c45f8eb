"""`zb show` and `zb report`: their facts are right, and no data can harm the terminal or the page.

Each cell of a row has the document, the place in it, the fields and the span of its source token; statistics are
compared with counts that are made one token and one document after the other.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import unicodedata
from collections import Counter, defaultdict
from html.parser import HTMLParser
from itertools import pairwise

import click
import numpy as np
import pytest
from commandline import run
from contents import measured, write_batches, write_stream
from damage import flip_stored, flip_token
from descriptors import open_files
from hypothesis import given
from hypothesis import strategies as st
from packed import write_packed

from zb_hdf5 import ArgumentError, HDF5ShardWriter, ShardIndex, open_corpus, open_reader, open_writer
from zb_hdf5.commands import rows as rows_module
from zb_hdf5.commands import statistics
from zb_hdf5.commands.description import describe
from zb_hdf5.commands.markup import Mark, fitting, tag
from zb_hdf5.commands.page import report_json, report_page
from zb_hdf5.commands.rows import PADDING, UNKNOWN, Row, document_row, row_lines, rows_json, rows_of
from zb_hdf5.commands.statistics import MAX_COUNTED_ID
from zb_hdf5.commands.zb import zb
from zb_hdf5.console import printable
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.store.rebuild import index_files
from zb_hdf5.text.readable import NEWLINE, readable, readable_runs, tokenizer_of
from zb_hdf5.text.tokenizers import load_tokenizer

BYTE = load_tokenizer("byte")
TEXT = "Once upon a time, 水 and\ttabs\nand \x1b[31mred\x1b[0m \u202eevil\u202c <script>alert('x')</script> &amp;\r\n"
NASTY = "</td></pre><script>alert(1)</script>\"'\x1b]0;title\x07"


def ids_of(text):
    return BYTE.encode(text).astype(np.uint16)


def shown_text(lines):
    """Return the text that lines of `zb show` show."""
    joined = "".join(line.removeprefix("│ ") for line in lines if line.startswith("│ "))
    return joined.replace(NEWLINE, f"{NEWLINE}\n")


def plain(lines):
    return [click.unstyle(line) for line in lines]


def spelt_out(text):
    return "".join(f"{NEWLINE}\n" if each == "\n" else printable(each) for each in text)


@pytest.fixture
def kinds(tmp_path, write_file, write_store):
    """The same tokens in everything that holds some: 4 batches of 2 x 160."""
    tokens = ids_of(TEXT * 40)[: 4 * 2 * 160].reshape(4, 2, 160)
    made = {"h5": tmp_path / "a.h5", "batch": tmp_path / "a.batch", "npy": tmp_path / "a.npy"}
    write_file(made["h5"], tokens)
    write_file(made["batch"], tokens)
    np.save(made["npy"], tokens.reshape(-1))
    made["store"] = write_store(tmp_path / "store", tokens, (1, 3), ("hdf5", "batch"))
    made["npys"] = tmp_path / "npys"
    made["npys"].mkdir()
    for number, part in enumerate(np.array_split(tokens.reshape(-1), 3)):
        np.save(made["npys"] / f"{number}.npy", part)
    made["stream"] = tmp_path / "s.h5"
    with HDF5ShardWriter(made["stream"], chunk_tokens=64) as writer:
        for document in np.array_split(tokens.reshape(-1), 5):
            writer.write_document(document)
    return tokens, made


KINDS = ["h5", "batch", "store", "npy", "npys", "stream"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_a_batch_of_every_kind_is_shown(kind, kinds):
    tokens, made = kinds
    shape = ("--batch-size", 2, "--seq-len", 160) if kind in ("npy", "npys", "stream") else ()
    result = run(zb, "show", made[kind], "--batch", 2, "--tokenizer", "byte", *shape)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert not [each for each in result.stdout if unicodedata.category(each) == "Cc" and each != "\n"]
    assert "\u202e" not in result.stdout
    report = json.loads(run(zb, "show", made[kind], "--batch", 2, "--tokenizer", "byte", *shape, "--json").stdout)
    shown = [[token for part in row["parts"] for token in part["tokens"]] for row in report["rows"]]
    assert shown == tokens[2].tolist()
    if kind in ("h5", "batch", "store"):  # nothing between the pieces
        wanted = "".join(spelt_out(readable(BYTE, row)) for row in tokens[2])
        assert shown_text(result.stdout.split("\n")) == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_a_sample_is_the_same_for_the_same_seed(kind, kinds):
    shown = [run(zb, "show", kinds[1][kind], "--sample", 1, "--seed", seed).stdout for seed in (*range(8), 0)]
    assert shown[0] == shown[-1]
    assert len(set(shown)) > 1


def test_ids_are_shown_where_the_tokenizer_is_not_known_or_does_not_have_them(kinds):
    tokens, made = kinds
    result = run(zb, "show", made["h5"], "--batch", 0)
    assert "ids are shown; pass --tokenizer" in result.stdout
    assert shown_text(result.stdout.splitlines()).split() == [str(token) for token in tokens[0].reshape(-1)]
    assert readable(BYTE, np.array([300, 97, 98, 70000, 70001, 99])) == "<300>ab<70000><70001>c"
    assert readable(BYTE, np.array([], np.uint16)) == ""
    ids = np.concatenate([ids_of("a"), np.full(500, 256, np.uint16), ids_of(" " * 50 + "b")])
    found = list(readable_runs(BYTE, ids))  # a run of one token is written once
    assert found == [("a<|endoftext|>", False), ("⟨× 500⟩", True), (" " * 50 + "b", False)]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)


@given(TEXTS, st.integers(20, 90))
def test_lines_fit_and_hold_the_whole_text(text, columns):
    row = Row("row", ids_of(text), np.zeros(1, np.int64), np.array([UNKNOWN]), np.zeros(1, np.int64))
    lines = plain(row_lines(row, BYTE, limit=None, columns=columns))
    assert all(line.isprintable() for line in lines)
    for line in lines:
        seen = [each for each in line if not unicodedata.combining(each)]
        assert sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in seen) <= columns
    if "".join(text for text, is_count in readable_runs(BYTE, row.tokens) if not is_count) == text:
        assert shown_text(lines) == spelt_out(text)


def test_colours_are_all_that_a_terminal_is_told(kinds):
    row = Row("row", ids_of(TEXT), np.zeros(1, np.int64), np.array([3]), np.zeros(1, np.int64), {}, [(2, 6, "x")])
    lines = list(row_lines(row, BYTE, limit=None, columns=80))
    assert any("\x1b[4m" in line for line in lines)  # the span is underlined
    assert all(re.sub(r"\x1b\[\d+m", "", line).isprintable() for line in lines)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_are_for_terminals_that_want_them(no_color, kinds):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", "from zb_hdf5.commands.zb import zb; zb()", "show", str(kinds[1]["stream"])]
    environment = {**os.environ, "NO_COLOR": no_color, "COLUMNS": "60"}
    subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, check=True)
    os.close(theirs)
    printed = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert ("\x1b[" in printed) == (not no_color)
    assert all(len(re.sub(r"\x1b\[\d+m", "", line)) <= 60 for line in printed.split("\r\n")[4:])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_boundaries_of_windows_are_those_of_the_documents(tmp_path_factory, lengths, data):
    if not sum(lengths):
        return
    path = tmp_path_factory.mktemp("s") / "s.h5"
    with HDF5ShardWriter(path, chunk_tokens=64) as writer:
        writer.write_documents(np.arange(sum(lengths), dtype=np.uint16), lengths)
    origin = [(number, at) for number, length in enumerate(lengths) for at in range(length)]
    seq_len = data.draw(st.integers(1, sum(lengths)))
    with open_reader(path, batch_size=1, seq_len=seq_len) as reader:
        for record, row in enumerate(rows_of(reader, np.arange(reader.num_records))):
            limit = data.draw(st.none() | st.integers(1, seq_len + 1))
            seen = {}
            for part in row.parts(limit):
                for place, token in enumerate(part.tokens.tolist()):
                    seen[part.column + place] = (token, (part.document, part.within + place))
            wanted = range(seq_len)
            if limit is not None and limit < seq_len:
                tail = limit // 4
                wanted = [*range(limit - tail), *range(seq_len - tail, seq_len)]
            first = record * seq_len
            assert seen == {column: (first + column, origin[first + column]) for column in wanted}
        for number, length in enumerate(lengths):
            row = document_row(reader, number)
            assert row.tokens.tolist() == [place for place, (of, _) in enumerate(origin) if of == number]
            assert [len(part.tokens) for part in row.parts(None)] == [length] * (length > 0)


def test_a_document_is_shown_by_its_number_and_what_cannot_be_shown_is_told(kinds):
    tokens, made = kinds
    third = np.array_split(tokens.reshape(-1), 5)[3]
    result = run(zb, "show", made["stream"], "--document", 3, "--tokenizer", "byte", "--tokens", 20)
    assert f"document 3 · {len(third)} tokens" in result.stdout
    assert f"{len(third) - 20} tokens left out; --all shows them" in result.stdout
    whole = run(zb, "show", made["stream"], "--document", 3, "--tokenizer", "byte", "--all").stdout
    assert shown_text(whole.split("\n")) == spelt_out(readable(BYTE, third))
    assert "left out" not in whole
    for arguments, code, message in (
        ((made["h5"], "--document", 1), 1, "a.h5: holds no documents"),
        ((made["stream"], "--document", 5), 1, "no document 5: it has 5"),
        ((made["h5"], "--batch", 4), 1, "no batch 4: it has 4"),
        ((made["h5"], "--batch", 1, "--sample", 2), 2, "exclude each other"),
        ((made["h5"], "--tokenizer", "abc"), 2, "expected byte"),
        ((made["h5"], "--seq-len", 4), 2, "as its batches are stored, found 4; leave it out"),
    ):
        result = run(zb, "show", *arguments)
        assert (result.exit_code, result.stdout) == (code, "")
        assert message in result.stderr


def fields_and_spans():
    text = ids_of("the river runs to the sea")
    mask = np.repeat([0, 1, 0], [4, 11, 10]).astype(np.uint8)
    vectors = np.linspace(0, 1, 50, dtype=np.float32).reshape(25, 2)
    pieces = (np.array([0, 10, 22]), np.array([7, 8, PADDING]), np.array([90, 0, 0]))
    spans = [(4, 9, {"concept": NASTY}), (12, 23, "to\x1b[0m")]
    return Row("batch 0 row 0", text, *pieces, {"loss_mask": mask, "vector": vectors}, spans)


def test_fields_and_spans_are_shown():
    lines = plain(row_lines(fields_and_spans(), BYTE, limit=None, columns=80))
    assert all(line.isprintable() and len(line) <= 80 for line in lines)
    titles = [line.strip("─ ") for line in lines if line.startswith("──")]
    assert titles == ["document 7, from its token 90", "document 8", "padding, 3 tokens"]
    assert "  loss_mask: 0 × 4, 1 × 6" in lines
    assert "  loss_mask: 1 × 5, 0 × 7" in lines
    assert "  vector: float32[2], 0.0 to 0.3877550959587097" in lines
    assert any(line.startswith('  4 to 9: {"concept": ') for line in lines)
    assert "  12 to 23: to\\x1b[0m" in lines
    found = rows_json([fields_and_spans()], BYTE, None)[0]
    assert [part.get("document") for part in found["parts"]] == [7, 8, None]
    assert found["parts"][1]["text"] == "runs to the "
    assert found["spans"][0] == {"start": 4, "stop": 9, "value": {"concept": NASTY}}


def test_headlines_say_where_a_document_came_from(tmp_path):
    packed, folder = write_packed(tmp_path / "p.h5", [60], seq_len=8, lost=0), "/some/folder"
    with open_reader(packed.path) as reader:
        row = document_row(reader, 0)
    for source, shown in (
        ("a.jsonl", "  id id-0, line 1 of a.jsonl"),
        (f"{folder * 9}/a.jsonl", f"  id id-0, line 1 of {folder * 9}"[:59] + "…"),
        ("x\x1b[0m", "  id id-0, row 1 of x\\x1b[0m"),
    ):
        known = {0: row.known[0]._replace(source=source)}
        lines = plain(row_lines(row._replace(known=known), None, limit=None, columns=60))
        assert lines[1:4] == ["── document 0 ".ljust(60, "─"), shown, '  {"n": 0}']


def test_a_document_of_batches_is_shown_with_all_that_is_known(tmp_path):
    packed = write_packed(tmp_path / "p.h5", [30, 40], lost=0.3, seed=4)
    found = json.loads(run(zb, "show", packed.path, "--document", 1, "--json").stdout)["rows"][0]
    tokens = [token for part in found["parts"] for token in part["tokens"]]
    held = packed.held(1)
    assert tokens == [token for _, token in held]
    assert 0 < len(held) < 40
    assert f"less {40 - len(held)} tokens that are not in the store" in found["name"]
    part = found["parts"][0]
    assert (part["id"], part["source"], part["source_row"], part["metadata"]) == ("id-1", "1.jsonl", 2, {"n": 1})
    assert set(part["fields"]) == set(packed.fields)
    lines = run(zb, "show", packed.path, "--document", 1).stdout
    assert "── document 1" in lines
    assert '{"document": 1, "span": 0}' in lines


def test_a_report_of_batches_with_documents(tmp_path):
    packed = write_packed(tmp_path / "p.h5", [5] * 40, vocab=2, lost=0.1)
    found = json.loads(run(zb, "report", packed.path, "-o", tmp_path / "r.html", "--json").stdout)
    assert found["duplicates"] > 0
    assert found["packing"]["lost"] == 200 - sum(len(packed.held(number)) for number in range(40))
    text = harmless((tmp_path / "r.html").read_text(encoding="utf-8"))
    for part in ("Sources", "0.jsonl", "that are there whole repeat an earlier one", "lie in several pieces", "id id-"):
        assert part in text


def test_the_tokenizer_that_a_store_names_is_found(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text(TEXT * 30)
    store = tmp_path / "store"
    run(convert, "text-to-hdf5", tmp_path / "in.txt", store, "--tokenizer", "byte", "--seq-len", 32, "--batch-size", 2)
    assert "and\\ttabs" in run(zb, "show", store, "--sample", 100).stdout
    pytest.importorskip("tiktoken")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": TEXT * count}) + "\n" for count in range(1, 30)))
    train = ("tokenizer", "train", tmp_path / "in.jsonl", "-o", folder / "tok.json", "--vocab-size", 270)
    assert run(zb, *train).exit_code == 0
    spec = f"tiktoken:{folder / 'tok.tiktoken'}"
    other = tmp_path / "other"
    arguments = ("--tokenizer", spec, "--seq-len", 32, "--batch-size", 2)
    assert run(convert, "text-to-hdf5", tmp_path / "in.txt", other, *arguments).exit_code == 0
    assert "ids are shown" in run(zb, "show", other).stdout
    assert "upon" in run(zb, "show", other, "--tokenizer", spec, "--sample", 100).stdout
    monkeypatch.chdir(folder)
    assert "upon" in run(zb, "show", other, "--sample", 100).stdout
    refused = run(zb, "show", other, "--tokenizer", "byte")
    assert refused.exit_code == 1
    assert "expected the tokenizer that it was made with" in refused.stderr


@pytest.mark.parametrize(
    "stored", ["", "gpt2", "[1]", "{", '{"kind": 3}', '{"digest": 5}', "[" * 100_000, '{"name": "/"}']
)
def test_any_text_may_stand_for_a_tokenizer(stored, tmp_path):
    assert tokenizer_of(stored, None, [tmp_path], "x") is None
    assert tokenizer_of(stored, "byte", [tmp_path], "x").spec == "byte"


class Page(HTMLParser):
    """Reads a page as a browser does, and notes what a browser would do with it."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tags = set()
        self.text = []
        self.attributes = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def harmless(text):
    page = Page(text)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "form", "a"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"url\(|@import|[\x00-\x08\x0b-\x1f\u202a-\u202e]", text)
    return "".join(page.text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_a_report_of_every_kind(kind, kinds, tmp_path):
    tokens, made = kinds
    out = tmp_path / "r.html"
    result = run(zb, "report", made[kind], "-o", out, "--tokenizer", "byte", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    ids, counts = np.unique(tokens, return_counts=True)
    assert found["tokens"] == found["tokens_counted"] == tokens.size
    assert found["ids_used"] == len(ids)
    assert found["ids_never_used"] == 257 - len(ids)
    assert sorted(map(tuple, found["most_frequent"]), key=lambda pair: (-pair[1], pair[0]))[0][1] == counts.max()
    assert dict(found["most_frequent"]).items() <= dict(zip(ids.tolist(), counts.tolist(), strict=True)).items()
    text = harmless(out.read_text(encoding="utf-8"))
    assert f"{257 - len(ids)} of the 257 ids of the vocabulary" in text
    assert "<script>alert('x')</script>" in text  # as text
    assert f"zb report {made[kind]} -o {out} --tokenizer byte --json" in text
    before = out.read_text(encoding="utf-8")
    assert run(zb, "report", made[kind], "-o", out, "--tokenizer", "byte").exit_code == 1  # it exists
    assert run(zb, "report", made[kind], "-o", out, "--tokenizer", "byte", "--force").exit_code == 0
    moment = r" on <span.*?</span>|<footer.*</footer>"
    assert re.sub(moment, "", out.read_text(encoding="utf-8")) == re.sub(moment, "", before)


def first_sentence(page):
    return "".join(Page(re.search(r"<p class=\"health[^>]*>.*?</p>", page)[0]).text)


def test_the_first_sentence_says_whether_it_is_healthy(kinds, tmp_path, write_file):
    _, made = kinds
    out = tmp_path / "r.html"

    def sentence(path, *options):
        assert run(zb, "report", path, "-o", out, "--force", *options).exit_code == 0
        return first_sentence(out.read_text(encoding="utf-8"))

    (made["batch"].parent / "a.batch.crc32").rename(tmp_path / "kept")
    for kind in ("h5", "store", "stream"):
        healthy = r"Healthy\. All 1,280 tokens agreed with their crc32 .* on \d{4}-\d\d-\d\d at \d\d:\d\d UTC\."
        assert re.fullmatch(healthy, sentence(made[kind])), kind
    for kind in ("batch", "npy", "npys"):
        text = "Not verified. No crc32 is stored that its tokens could be compared with. "
        assert sentence(made[kind]) == f"{text}Run zb verify {made[kind]}, which names the way to one."
    text = sentence(made["h5"], "--sample-batches", 2)
    assert text == f"Not verified. This page has looked at a sample only. Run zb verify {made['h5']}."
    packed = write_packed(tmp_path / "p.h5", [10, 0, 30])
    assert sentence(packed.path).endswith(
        f"The command zb verify {packed.path} compares the fields and documents as well."
    )
    flip_token(made["h5"], 1)
    flip_token(min(made["store"].glob("shard-*")), 0)
    flip_stored(made["stream"], ids_of(TEXT)[70:90])
    for kind in ("h5", "store", "stream"):  # what is called healthy was compared
        assert "crc32" in run(zb, "report", made[kind], "-o", out, "--force").stderr, kind


def test_a_report_has_each_split_and_no_internal_key(tmp_path):
    for name, count in (("a", 60), ("b", 20)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": f"{name} text " * 5}) + "\n") * count)
    how = ("--tokenizer", "byte", "--val-last-shard", "--packing", "pad", "--batch-size", 2, "--seq-len", 64)
    command = ("jsonl-to-hdf5", tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "store", *how)
    assert run(convert, *command).exit_code == 0
    found = json.loads(run(zb, "report", tmp_path / "store", "-o", tmp_path / "r.html", "--json").stdout)
    whole = measured(tmp_path / "store")
    assert [each.name for each in whole.splits] == [*found["splits"]] == ["train", "val"]
    assert sum(each.counts for each in whole.splits).tolist() == whole.counts.tolist()
    assert sum(each.padding for each in whole.splits) == whole.packing["padding"]
    assert sum(each.tokens for each in whole.splits) == whole.num_tokens
    for each, letter, other in zip(whole.splits, "ab", "ba", strict=True):
        with open_reader(tmp_path / "store", split=each.name) as reader:
            alone = statistics.measure(reader, None, lambda *_: None)
        assert (each.tokens, alone.splits) == (alone.num_tokens, [])
        assert (each.counts[ord(letter)] > 0, each.counts[ord(other)]) == (True, 0)
        assert each.counts.tolist() == alone.counts.tolist()
        assert sorted(each.lengths) == sorted(alone.lengths)
    text = harmless((tmp_path / "r.html").read_text(encoding="utf-8"))
    facts = text.partition("Facts")[2].partition("Tokens")[0]
    assert not re.search(r"\w_\w|\bwork\b|None|null", facts.replace(str(tmp_path), ""))
    assert all(f"{name}: How many" in text for name in ("train", "val"))


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=40, unique=True), st.integers(100, 900))
def test_labels_of_an_axis_do_not_overlap(values, width_px):
    marks = [Mark(float(number), f"{value:,}") for number, value in enumerate(sorted(values))]
    length = max(1, len(marks) - 1)
    shown = fitting(marks, length, width_px)
    assert shown[0] == marks[0]
    assert marks[-1] in shown or width_px < 7 * (len(marks[0].text) + len(marks[-1].text)) + 10
    at = [width_px * mark.position / length for mark in shown]
    half = [7 * len(mark.text) / 2 for mark in shown]
    for (left, right), (size, after) in zip(pairwise(at), pairwise(half), strict=True):
        ends = left + (2 * size if left == 0 else size)
        begins = right - (2 * after if right == width_px else after)
        assert ends < begins


def test_nothing_in_metadata_harms_a_page(tmp_path, write_store):
    tokens = np.arange(96, dtype=np.uint16).reshape(4, 2, 12)
    folder = write_store(tmp_path / "a<b>&", tokens)
    index = ShardIndex.load(folder)
    named = {"kind": "hf", "name": NASTY, "digest": NASTY}
    meta = index.meta.__class__(2, 12, index.meta.dtype, tokenizer=json.dumps(named), vocab_size=100)
    source = {"format": NASTY, "files": [NASTY] * 30, NASTY: {NASTY: [NASTY]}}
    ShardIndex(meta, index.shards, source=source).save(folder)
    assert run(zb, "report", folder, "-o", tmp_path / "r.html").exit_code == 0
    text = harmless((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert text.count(printable(NASTY)) >= 20 + 3
    inner = tag("b", "<i>")
    assert tag("p", "a<b", inner, title='"<') == '<p title="&quot;&lt;">a&lt;b<b>&lt;i&gt;</b></p>'
    assert "and 10 files more" in text
    assert "a<b>&" in text


def test_the_page_has_fields_and_spans_and_says_that_it_is_of_a_sample(kinds, tmp_path, write_file):
    path = kinds[1]["h5"]
    with open_reader(path) as reader:
        page = report_page(
            report_json(path, found := measured(path), 257), found, reader, [fields_and_spans()], BYTE, describe(path)
        )
    text = harmless(page)
    for part in (
        "document 7, from its token 90",
        "document 8",
        "padding, 3 tokens",
        "loss_mask: 0 × 4",
        "12 to 23: to",
    ):
        assert part in text
    assert 'class="span"' in page
    tokens = np.arange(40 * 2 * 8, dtype=np.uint16).reshape(40, 2, 8)
    write_file(tmp_path / "b.h5", tokens)
    result = run(zb, "report", tmp_path / "b.h5", "-o", tmp_path / "r.html", "--sample-batches", 4, "--json")
    assert json.loads(result.stdout)["tokens_counted"] == 4 * 16
    text = harmless((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "An even sample: 64 of 640 tokens (10.00%) were looked at" in text


def test_a_report_of_nothing_and_one_into_no_folder_are_refused(tmp_path, monkeypatch):
    with open_writer(tmp_path / "live", batch_size=2, seq_len=4, live=True, shard_batches=4):
        result = run(zb, "report", tmp_path / "live", "-o", tmp_path / "r.html")
        assert result.exit_code == 2
        assert "live: expected tokens to count, found none; wait until its writer has committed" in result.stderr
    assert not (tmp_path / "r.html").exists()
    monkeypatch.setattr("zb_hdf5.commands.statistics.measure", None)
    made = write_packed(tmp_path / "p.h5", [30, 40], lost=0.3, seed=4)
    result = run(zb, "report", made.path, "-o", tmp_path / "none" / "r.html")
    assert result.exit_code == 2
    assert f"{tmp_path}/none/r.html: expected a folder to write into, found no {tmp_path}/none" in result.stderr


# --- rows ------------------------------------------------------------------------------------------------------
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def cells_of(row):
    """Return (token, document, place, span) of each column of a row."""
    found = []
    for part in row.parts(None):
        for k, token in enumerate(part.tokens.tolist()):
            column = part.column + k
            [*span] = [value for start, stop, value in row.spans if start <= column < stop]
            is_text = part.document != PADDING
            found.append((token, part.document, part.within + k if is_text else 0, *span))
    return found


def expected_cells(packed, row):
    """Return the same from the written documents."""
    return [
        (token, of, place, *(value for start, stop, value in packed.spans.get(of, []) if start <= place < stop))
        for token, of, place in packed.cells[row]
    ]


def require_fields(row, packed, places):
    """Compare the fields of a row with those that were written at (record, column) places."""
    assert set(row.fields) == set(packed.fields)
    for name, values in row.fields.items():
        expected = np.array([packed.fields[name][place] for place in places], values.dtype)
        np.testing.assert_array_equal(values, expected.reshape(values.shape))


@given(LENGTHS, st.integers(0, 999), st.just(".h5"), st.sampled_from([None, 4, 2]))
def test_cells_are_those_of_their_source(tmp_path_factory, lengths, seed, suffix, seq_len):
    packed = write_packed(tmp_path_factory.mktemp("p") / f"x{suffix}", lengths, seed=seed)
    size = seq_len or 8
    with open_reader(packed.path) as reader:
        asked = np.random.default_rng(seed).integers(0, reader.num_records * 8 // size, 5)
        for record, row in zip(asked.tolist(), rows_of(reader, asked, seq_len), strict=True):
            stored, first = record * size // 8, record * size % 8
            assert cells_of(row) == expected_cells(packed, stored)[first : first + size]
            require_fields(row, packed, [(stored, first + k) for k in range(size)])
            for number, document in row.known.items():
                assert (document.id, document.row, document.metadata) == (f"id-{number}", number + 1, {"n": number})
                assert document.source == f"{number % 2}.jsonl"


@given(LENGTHS, st.integers(0, 999), st.sampled_from([1, 3, 1 << 14]))
def test_a_document_is_put_together_from_its_pieces(tmp_path_factory, lengths, seed, records_at_once):
    packed = write_packed(tmp_path_factory.mktemp("p") / "x.h5", lengths, seed=seed)
    place_of = {cell[1:]: (r, c) for r, row in enumerate(packed.cells) for c, cell in enumerate(row)}
    with open_reader(packed.path) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "RECORDS_AT_ONCE", records_at_once)
        for number, tokens in enumerate(packed.documents):
            row = document_row(reader, number)
            held = packed.held(number)
            spans = packed.spans[number]
            assert cells_of(row) == [
                (token, number, place, *(value for a, b, value in spans if a <= place < b)) for place, token in held
            ]
            require_fields(row, packed, [place_of[number, place] for place, _ in held])
            lost = len(tokens) - len(held)
            assert (f"less {lost:,} tokens that are not in the store" in row.name) == (lost > 0)
            jumps = sum(place != before + 1 for (before, _), (place, _) in zip(held, held[1:], strict=False))  # noqa: RUF007
            assert len(row.parts(None)) == (jumps + 1 if held else 0)


def test_a_document_of_a_stream_has_its_fields_and_spans_as_bytes_where_they_cannot_be_decoded(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", fields={"mask": "u1", "vector": ("f4", (2,))}) as writer:
        for number in range(3):
            values = {"mask": np.arange(4) + number, "vector": np.arange(8).reshape(4, 2) + number}
            writer.write_document(np.arange(4), values, spans=[(1, 3, f"span {number}")], id=f"id-{number}")
    with open_reader(tmp_path / "s.h5", batch_size=1, seq_len=6) as reader:
        row = document_row(reader, 1)
        assert row.spans == [(1, 3, "span 1")]
        assert row.known[1].id == "id-1"
        assert row.fields["mask"].tolist() == [1, 2, 3, 4]
        assert row.fields["vector"].tolist() == (np.arange(8).reshape(4, 2) + 1).tolist()
        [_, window] = rows_of(reader, np.arange(2))  # tokens 6 to 12: half of document 1, and document 2
        assert window.spans == [(0, 1, "span 1"), (3, 5, "span 2")]
        assert window.fields["mask"].tolist() == [3, 4, 2, 3, 4, 5]
    with HDF5ShardWriter(tmp_path / "p.h5", spans_codec=pickle.dumps) as writer:
        writer.write_document([1, 2, 3], spans=[(0, 2, {"a": 1})])
    with open_reader(tmp_path / "p.h5", batch_size=1, seq_len=3) as reader:
        [(start, stop, value)] = document_row(reader, 0).spans
    assert (start, stop, type(value)) == (0, 2, bytes)


@pytest.mark.parametrize(("values", "text"), [
    (np.array([b"a", b"a", b"b"]), "b'a' × 2, b'b' × 1"),
    (np.zeros(2, [("x", "u1"), ("y", "f4")]), "(0, 0.0) × 2"),
    (np.zeros((2, 3), "S2"), "bytes16[3]"),
    (np.zeros((2, 3), "f4"), "float32[3], 0.0 to 0.0"),
])  # fmt: skip
def test_fields_of_any_dtype_are_summed_up(values, text):
    assert rows_module.summary_of_field(values) == text


# --- statistics --------------------------------------------------------------------------------------------------
#: Few tokens and short documents: many of them are equal.
DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=40)


def slow(units):
    """Return repeated units, their tokens, and the groups of equal ones."""
    groups = defaultdict(list)
    for number, unit in units.items():
        if len(unit):
            groups[tuple(unit)].append(number)
    again = {unit: numbers for unit, numbers in groups.items() if len(numbers) > 1}
    copies = sum(len(numbers) - 1 for numbers in again.values())
    tokens = sum((len(numbers) - 1) * len(unit) for unit, numbers in again.items())
    ordered = sorted(again.items(), key=lambda item: (-(len(item[1]) - 1) * len(item[0]), item[1][0]))
    return copies, tokens, [(numbers, len(unit)) for unit, numbers in ordered[: statistics.MAX_GROUPS]]


def check(found, units, tokens=None):
    """Compare with units, a list or number -> tokens, and with all tokens if these are more."""
    units = dict(enumerate(units)) if isinstance(units, list) else units
    tokens = [token for unit in units.values() for token in unit] if tokens is None else tokens
    assert {token: int(count) for token, count in enumerate(found.counts) if count} == Counter(tokens)
    assert found.units == len(units)
    copies, repeated, groups = slow(units)
    assert (found.duplicates, found.duplicate_tokens) == (copies, repeated)
    assert [(group.units, group.length) for group in found.duplicate_groups] == groups
    for group in found.duplicate_groups:
        beginning = group.beginning.tolist()
        assert beginning
        assert beginning == list(units[group.units[0]])[: len(beginning)]


def write_documents(path, documents):
    tokens = [token for document in documents for token in document]
    write_stream(path, np.array(tokens, np.uint16), list(map(len, documents)), chunk_tokens=64)


@given(DOCUMENTS, st.sampled_from([1, 5, 1 << 18]), st.booleans())
def test_a_stream(tmp_path_factory, documents, stretch, collide):
    if not any(documents):
        return
    path = tmp_path_factory.mktemp("s") / "s.h5"
    write_documents(path, documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "STREAM_TOKENS", stretch)
        if collide:  # all hashes are equal
            patch.setattr(statistics, "_hashes", lambda tokens, lengths, within: np.zeros(len(lengths), np.uint64))
        found = measured(path)
    check(found, documents)
    assert (found.tokens, found.packing, found.sources) == (sum(map(len, documents)), None, [])
    assert found.unit == "document"
    assert found.lengths.tolist() == [len(document) for document in documents]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.sampled_from([1, 64, 4 << 20]))
def test_batches(tmp_path_factory, num_batches, batch_size, seq_len, seed, group_bytes):
    tokens = np.random.default_rng(seed).integers(0, 3, (num_batches, batch_size, seq_len)).astype(np.uint16)
    path = tmp_path_factory.mktemp("b") / "b.h5"
    write_batches(path, tokens, dtype="uint16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "READ_BYTES", group_bytes)
        found = measured(path)
    check(found, tokens.reshape(-1, seq_len).tolist())
    assert (found.unit, found.lengths, found.tokens) == ("record", None, tokens.size)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(0, 999), st.sampled_from([0, 0.1, 0.5]),
    st.sampled_from([1, 4 << 20]), st.booleans(),
)  # fmt: skip
def test_documents_in_batches(tmp_path_factory, lengths, seed, lost, group_bytes, collide):
    packed = write_packed(tmp_path_factory.mktemp("p") / "x.h5", lengths, seed=seed, lost=lost, vocab=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "READ_BYTES", group_bytes)
        if collide:
            patch.setattr(statistics, "_hashes", lambda tokens, lengths, within: np.zeros(len(lengths), np.uint64))
        found = measured(packed.path)
    held = {number: packed.held(number) for number in range(len(lengths))}
    whole = {number: packed.documents[number] for number, there in held.items() if len(there) == lengths[number]}
    check(found, whole, [token for there in held.values() for _, token in there])
    assert (found.unit, found.lengths.tolist(), found.num_units) == ("document", lengths, len(lengths))
    there = [len(held[number]) for number in range(len(lengths))]
    assert found.packing["padding"] == sum(of < 0 for row in packed.cells for _, of, _ in row)
    assert found.packing["absent"] == sum(length > 0 == now for length, now in zip(lengths, there, strict=True))
    assert found.packing["cropped"] == sum(length > now > 0 for length, now in zip(lengths, there, strict=True))
    assert found.packing["lost"] == sum(lengths) - sum(there)
    begins = Counter()
    for row in packed.cells:
        befores = [(-1, 0), *((of, place) for _, of, place in row)]
        begins.update(of for (_, of, place), before in zip(row, befores, strict=False) if before != (of, place - 1))
    assert found.packing["split"] == sum(count > 1 for of, count in begins.items() if of >= 0)
    names = {f"{k}.jsonl": lengths[k::2] for k in range(2) if lengths[k::2]}
    assert {name: counts for name, *counts in (source.values() for source in found.sources)} == {
        name: [len(part), sum(part)] for name, part in names.items()
    }


def test_sources_are_counted_with_one_table_open_at_a_time(tmp_path):
    paths = [tmp_path / f"shard-{number:05}.h5" for number in range(3)]
    for path in paths:
        with HDF5ShardWriter(path, chunk_tokens=64) as writer:
            writer.write_document(np.arange(9), id="a")
    index_files(paths).save(tmp_path)
    with open_corpus(tmp_path) as store:
        table, before = store.document_table, open_files()
        assert statistics._sources(table) == []
        assert open_files() == before


def test_samples_are_spread_evenly_over_batches_and_have_whole_documents_of_a_stream(tmp_path, monkeypatch):
    tokens = np.arange(20 * 2 * 4, dtype=np.uint16).reshape(20, 2, 4)
    tokens[19, 1] = tokens[0, 0]
    write_batches(tmp_path / "b.h5", tokens, dtype="uint16")
    found = measured(tmp_path / "b.h5", sample_batches=3)
    assert (found.num_tokens, found.tokens, found.num_units, found.units) == (160, 24, 40, 6)
    assert np.flatnonzero(found.counts).tolist() == np.unique(tokens[[0, 10, 19]]).tolist()
    assert [group.units for group in found.duplicate_groups] == [[0, 39]]
    assert measured(tmp_path / "b.h5", sample_batches=1000).tokens == 160
    monkeypatch.setattr(statistics, "STREAM_TOKENS", 10)
    documents = [[number] * 7 for number in range(30)]
    write_documents(tmp_path / "s.h5", documents)
    found = measured(tmp_path / "s.h5", sample_batches=4)
    assert found.units == found.tokens // 7 < 30
    assert set(found.counts.tolist()) == {0, 7}


def test_files_of_npy_are_compared_whole_and_ids_that_no_tokenizer_has_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "STREAM_TOKENS", 16)
    parts = [np.arange(100), np.arange(100) + 1, np.arange(100)]
    for number, part in enumerate(parts):
        np.save(tmp_path / f"{number}.npy", part.astype(np.uint16))
    found = measured(tmp_path)
    check(found, [part.tolist() for part in parts])
    assert found.unit == "file"
    np.save(tmp_path / "a.npy", np.array([3, 3, MAX_COUNTED_ID, 2**31, 2**32 - 1, MAX_COUNTED_ID - 1]))
    found = measured(tmp_path / "a.npy")
    assert found.uncounted == 3
    assert (len(found.counts), found.counts[3], found.counts[-1]) == (MAX_COUNTED_ID, 2, 1)


def test_progress_ends_at_the_total_and_nothing_cannot_be_measured(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(1000, np.uint16))
    seen = []
    measured(tmp_path / "a.npy", progress=lambda tokens, total: seen.append((tokens, total)))
    assert sum(tokens for tokens, _ in seen) == 1000 == seen[-1][1]
    np.save(tmp_path / "b.npy", np.zeros(1000, np.uint16))
    seen.clear()
    assert measured(tmp_path, progress=lambda tokens, total: seen.append((tokens, total))).duplicates == 1
    assert sum(tokens for tokens, _ in seen) == 4000 == seen[-1][1]  # both are read again
    (tmp_path / "b.npy").unlink()
    np.save(tmp_path / "a.npy", np.zeros(0, np.uint16))
    with pytest.raises(ArgumentError, match="0 tokens do not fill one batch"):
        measured(tmp_path / "a.npy")


def test_hashes_tell_short_documents_apart_and_add_up():
    pairs = np.stack(np.meshgrid(np.arange(300), np.arange(300)), axis=-1).reshape(-1, 2)
    zeros = np.zeros(len(pairs), np.int64)
    whole = statistics._hashes(pairs.reshape(-1), zeros + 2, zeros)
    assert len(np.unique(whole)) == len(pairs)
    halves = statistics._hashes(pairs.reshape(-1), np.ones(pairs.size, np.int64), np.tile([0, 1], len(pairs)))
    assert np.array_equal(halves[::2] + halves[1::2], whole)
