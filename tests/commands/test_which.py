"""`zb which` names the rows that made a step; the tokens of those rows are the tokens of the step."""

import json

import numpy as np
import pytest
from commandline import report_of, run_zb, succeed
from contents import write_batches
from packed import write_packed

from zb_hdf5 import HDF5ShardWriter, Loader, MixedLoader, open_reader, open_writer
from zb_hdf5.commands.zb import zb

TOKENS = np.random.default_rng(8).integers(0, 60_000, (30, 4, 16), dtype=np.uint16)


@pytest.fixture
def tokens():
    return TOKENS


@pytest.fixture
def cuts():
    return (10, 20)


def rows_named(batch):
    """Read the rows that a report names, straight from the shard files."""
    rows = []
    for part in batch["rows"]:
        with open_reader(part["shard"]) as reader:
            rows += [reader.read_batch(part["batch"])[row] for row in part["rows"]]
    return np.array(rows)


def which(*arguments, code=0):
    """Return the batches of a report of `zb which`; where the command fails, what it prints."""
    found = report_of(zb, "which", *arguments, code=code)
    return found if code else found["batches"]


def test_wrong_states_are_told(store, tmp_path):
    how, state = {"rank": 0, "world_size": 1}, tmp_path / "state.json"
    with Loader(store, **how) as loader, MixedLoader({"a": store}, {"a": 1}, **how) as mixed:
        good = loader.state_dict()
        of_dataset = loader.dataset().state_dict()
        of_mixture = mixed.state_dict()
    for source, content, step, code, message in (
        (store, "{not json", 0, 1, "not JSON"),
        (store, "[" * 100_000, 0, 1, "not JSON"),
        (store, "{}", 0, 1, "expected kind 'loader', found None"),
        (store, json.dumps(good | {"fingerprint": "sha256:other"}), 0, 1, "fingerprint"),
        (store, json.dumps(of_dataset), 0, 1, "expected kind 'loader', found 'batches'"),
        (store, json.dumps(good | {"kind": ["loader"]}), 0, 1, "kind"),
        (store, json.dumps(good), 10**6, 2, "end"),
        (store, json.dumps(good), 10**30, 2, "expected a step below"),
        (f"a={store}", json.dumps(of_mixture), 10**30, 2, "expected a step below"),
    ):
        state.write_text(content)
        found = which(source, "--state", state, "--step", step, code=code)
        assert (message in found, "force" in found) == (True, False), found


def require_documents(found, rows, documents):
    """Compare the tokens of a step, and their text, with those of the documents that are named."""
    covered = 0
    for piece in found["documents"]:
        tokens = rows[piece["row"]][piece["column"] : piece["column"] + piece["tokens"]].tolist()
        covered += len(tokens)
        number = piece["document"]
        if number is None:
            assert set(tokens) == {0}
            continue
        first = piece["first_token"]
        assert tokens == documents[number][first : first + len(tokens)]
        assert piece["offset"] == sum(map(len, documents[:number])) + first
        assert piece["id"] == f"id-{number}"
        if piece["text"] is not None:
            assert piece["text"].encode() == bytes(tokens)
    assert covered == rows.size


LENGTHS = np.random.default_rng(2).integers(0, 40, 30).tolist()


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path / "p.h5", LENGTHS, vocab=100, batch_size=4)


@pytest.mark.parametrize("options", [{}, {"shuffle": "records", "batch_size": 3}, {"seq_len": 4}])
def test_documents_behind_a_step_are_those_of_its_tokens(packed, tmp_path, options):
    loaders = [Loader(packed.path, rank=r, world_size=2, **options) for r in range(2)]
    steps = list(zip(*loaders, strict=True))
    (tmp_path / "state.json").write_text(json.dumps(loaders[0].state_dict()))
    for step in (0, 2, len(steps) - 1):
        asked = ("--state", tmp_path / "state.json", "--step", step, "--world-size", 2, "--text", "--tokenizer", "byte")
        size = ("--batch-size", options["batch_size"]) if "batch_size" in options else ()
        found = which(packed.path, *asked, *size)
        for item, rows in zip(found, steps[step], strict=True):
            require_documents(item, rows.numpy(), packed.documents)
            assert {(p["source"], p["source_row"]) for p in item["documents"] if p["document"] is not None} <= {
                (f"{number % 2}.jsonl", number + 1) for number in range(len(LENGTHS))
            }


def test_documents_behind_windows_are_those_of_their_tokens(tmp_path):
    documents = [np.random.default_rng(n).integers(0, 100, length).tolist() for n, length in enumerate(LENGTHS)]
    with HDF5ShardWriter(tmp_path / "s.h5", chunk_tokens=64) as writer:
        for number, document in enumerate(documents):
            writer.write_document(document, id=f"id-{number}")
    loader = Loader(tmp_path / "s.h5", batch_size=3, seq_len=20, targets=True, rank=0, world_size=1)
    steps = list(loader)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    for step, (x, y) in enumerate(steps):
        [found] = which(tmp_path / "s.h5", "--state", tmp_path / "state.json", "--step", step, "--batch-size", 3)
        require_documents(found, np.concatenate([x.numpy(), y.numpy()[:, -1:]], axis=1), documents)
    every = [token for document in documents for token in document]
    [found] = which(tmp_path / "s.h5", "--batch", 3, "--batch-size", 4, "--seq-len", 16)
    assert [(row["start"], row["stop"]) for row in found["rows"]] == [(at, at + 16) for at in range(192, 256, 16)]
    require_documents(found, np.array(every[192:256]).reshape(4, 16), documents)
    [found] = which(tmp_path / "s.h5", "--batch", 0)  # a row of all tokens: the stream has fewer than 512
    assert [row["start"] for row in found["rows"]] == [0]
    assert "no batch 99" in which(tmp_path / "s.h5", "--batch", 99, code=1)


def test_windows_behind_the_last_whole_batch_of_a_state_are_named(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5") as writer:
        writer.write_document(np.arange(30 * 8 + 1))
    how = {"seq_len": 8, "targets": True, "rank": 0, "world_size": 1}
    with Loader(tmp_path / "s.h5", batch_size=13, **how) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        with Loader(tmp_path / "s.h5", batch_size=3, **how) as resumed:
            resumed.load_state_dict(loader.state_dict())
            steps = [x[:, 0].tolist() for x, _ in resumed]
    assert steps[-1] == [27 * 8, 28 * 8, 29 * 8]
    for step in (0, 8, 9):
        [found] = which(tmp_path / "s.h5", "--state", tmp_path / "state.json", "--step", step, "--batch-size", 3)
        assert [row["start"] for row in found["rows"]] == steps[step]


def test_info_counts_the_records_that_fill_no_step(tmp_path, store):
    np.save(tmp_path / "s.npy", np.arange(300 * 4 + 1))
    shape = ("--batch-size", 64, "--seq-len", 4)
    found = report_of(zb, "info", tmp_path / "s.npy", *shape, "--world-size", 2)["epoch"]
    counts = {"records": 300, "steps": 2, "left_out": 44}
    assert found == {"batch_size": 64, "seq_len": 4, "world_size": 2} | counts
    text = '300 records: 4 steps of 64 x 4 on 1 rank, and 44 that last="drop" leaves out (another last= reads them)'
    assert text in succeed(zb, "info", tmp_path / "s.npy", *shape).stdout
    assert "120 records: 24 steps of 5 x 16 on 1 rank\n" in succeed(zb, "info", store, "--batch-size", 5).stdout
    text = '120 records: 4 steps of 4 x 16 on 7 ranks, and 8 that last="drop" leaves out'
    assert text in succeed(zb, "info", store, "--world-size", 7).stdout
    assert "is a token stream: pass seq_len" in run_zb("info", tmp_path / "s.npy", "--batch-size", 64).stderr
    assert "must divide the stored 16" in run_zb("info", store, "--seq-len", 5).stderr


@pytest.mark.parametrize("value", [None, "7", 1.5, True, [7], {"a": 7}, -1, 2**70])
def test_a_value_of_a_state_that_cannot_be_is_told(value, store, tmp_path):
    mixed = MixedLoader({"a": store}, {"a": 1}, rank=0, world_size=1)
    of_source = mixed.state_dict()["sources"][0]
    whole, state = Loader(store, rank=0, world_size=1).state_dict(), tmp_path / "state.json"
    states = [(store, whole | {key: value}) for key in whole]
    states += [(f"a={store}", mixed.state_dict() | {key: value}) for key in mixed.state_dict()]
    states += [(f"a={store}", mixed.state_dict() | {"sources": [of_source | {key: value}]}) for key in of_source]
    for name, content in states:
        state.write_text(json.dumps(content))
        done = run_zb("which", name, "--state", state, "--step", 0)  # no exception but an exit
        assert done.exit_code == 0 or done.stderr.startswith(("Error: ", "Usage: ")), done.output
    mixed.close()


def test_a_stored_batch_needs_no_state_also_in_a_shard_that_grows(packed, tmp_path):
    with open_reader(packed.path) as reader:
        for batch in range(len(reader)):
            [found] = which(packed.path, "--batch", batch)
            assert found["rows"] == [{"shard": str(packed.path), "batch": batch, "rows": [0, 1, 2, 3]}]
            require_documents(found, reader.read_batch(batch), packed.documents)
    with open_writer(tmp_path / "live", batch_size=4, seq_len=16, live=True, shard_batches=4) as writer:
        for batch in TOKENS[:6]:
            writer.write(batch[None])
        [found] = which(tmp_path / "live", "--batch", 5)
        assert np.array_equal(rows_named(found), TOKENS[5])
    [found] = which(tmp_path / "live", "--batch", 5)
    assert np.array_equal(rows_named(found), TOKENS[5])


@pytest.mark.parametrize("layout", ["batches", "stream"])
def test_a_step_of_another_split_is_named_also_without_its_name(layout, tmp_path):
    texts = [{"text": f"{number} is a number, and {number + 1} the next one"} for number in range(200)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    how = ("--tokenizer", "byte", "--val-fraction", 0.3, "--workers", 1, "--layout", layout)
    shape = ("--batch-size", 2, "--seq-len", 32) if layout == "batches" else ()
    succeed(zb, "convert", "jsonl-to-hdf5", tmp_path / "x.jsonl", tmp_path / "s", *how, *shape)
    windows = {} if layout == "batches" else {"batch_size": 2, "seq_len": 32}
    for split in ("val", "train"):
        with Loader(tmp_path / "s", split=split, rank=0, world_size=1, **windows) as loader:
            steps = list(loader)
            (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        with MixedLoader({"a": tmp_path / "s"}, {"a": 1}, split=split, rank=0, world_size=1, **windows) as mixed:
            (tmp_path / "mixed.json").write_text(json.dumps(mixed.state_dict()))
        asked = ("--state", tmp_path / "state.json", "--step", 2, "--text", "--tokenizer", "byte")
        size = () if layout == "batches" else ("--batch-size", 2)
        text = bytes(np.where(steps[2].numpy() < 256, steps[2].numpy(), 0).astype("u1").reshape(-1))
        text = text.replace(b"\0", b"").decode()
        of_mixture = (f"a={tmp_path / 's'}", "--state", tmp_path / "mixed.json", *asked[2:])
        for command in (
            (tmp_path / "s", *asked, *size),
            (tmp_path / "s", *asked, *size, "--split", split),
            of_mixture,
        ):
            [found] = which(*command)
            shown = "".join(part["text"] for part in found["documents"]).replace("<|endoftext|>", "")
            assert shown == text
        other = "train" if split == "val" else "val"
        told = f"the state is of the split {split} of {tmp_path / 's'}, found --split {other}: leave it out"
        assert told in which(tmp_path / "s", *asked, *size, "--split", other, code=1)
        look = ("--batch", 0, "--batch-size", 2, "--seq-len", 32) if windows else ("--batch", 0)
        with open_reader(tmp_path / "s", split=split, **windows) as reader:
            expected = reader.read_batch(0).reshape(-1).tolist()
        [found] = which(tmp_path / "s", *look, "--split", split)
        assert sum(part["tokens"] for part in found["documents"]) == len(expected)
        rows = report_of(zb, "show", tmp_path / "s", *look, "--split", split, "--all")["rows"]
        assert [token for row in rows for part in row["parts"] for token in part["tokens"]] == expected
    assert "expected a split that" in which(tmp_path / "s", "--batch", 0, "--split", "test", code=2)


@pytest.mark.parametrize(("split", "name"), [("train", "train.npy"), ("val", "val.npy"), (None, "train.npy")])
def test_a_state_of_a_split_of_files_is_found_without_a_note(split, name, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for file, first in (("train.npy", 0), ("val.npy", 1000)):
        np.save(folder / file, np.arange(first, first + 64, dtype=np.uint16).reshape(8, 8))
    how = {"batch_size": 2, "shuffle": "sequential", "rank": 0, "world_size": 1, "split": split}
    with Loader(folder, **how) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    asked = ("which", folder, "--state", tmp_path / "state.json", "--step", 0)
    done = run_zb(*asked, code=0)
    assert (done.stderr, done.stdout.count(name)) == ("", 1)
    told = "all splits" if split is None else f"the split {split}"
    other = run_zb(*asked, "--split", "train" if split != "train" else "val", code=1)
    assert f"the state is of {told} of {folder}, found --split" in other.stderr


def printed(*arguments):
    return succeed(zb, "which", *arguments).stdout.splitlines()


def test_lines_and_the_text_of_a_part_are_limited_and_say_so(tmp_path, packed, monkeypatch):
    write_batches(tmp_path / "x.h5", np.arange(1000).reshape(1, 1, 1000) % 90 + 33, dtype="uint16")
    words = (tmp_path / "x.h5", "--batch", 0, "--text", "--tokenizer", "byte")
    some, whole = printed(*words), printed(*words, "--all")
    assert sum(line.startswith("│ ") for line in some) == 3
    assert "the rest of its text is left out; --all shows it" in some[-1]
    text = "".join(line.removeprefix("│ ") for line in whole if line.startswith("│ "))
    assert text == "".join(chr(each % 90 + 33) for each in range(1000))
    whole = printed(packed.path, "--batch", 0, "--all")
    [found] = which(packed.path, "--batch", 0)
    titles = [line for line in whole if line.startswith("── ")]
    assert len(titles) == len(found["documents"])
    for line, piece in zip(titles, found["documents"], strict=True):
        assert line.startswith(f"── columns {piece['column']} to {piece['column'] + piece['tokens']}: ")
        if piece["document"] is not None:
            assert f"document {piece['document']}" in line
            assert f", offset {piece['offset']}" in line
    piece = next(piece for piece in found["documents"] if piece["document"] is not None)
    assert any(f"id {piece['id']}, line {piece['source_row']} of {piece['source']}" in line for line in whole)
    monkeypatch.setattr("zb_hdf5.commands.zb_which.ROWS_SHOWN", 1)
    some = printed(packed.path, "--batch", 0)
    assert [line.partition(":")[0] for line in some if " · " in line and line.startswith("row")] == ["row 0"]
    assert some[-1] == "3 rows more; --all shows them, --json has them"
    text = printed(packed.path, "--batch", 0, "--text", "--tokenizer", "byte")
    assert all(line.isprintable() for line in text)
    assert any(line.startswith("│ ") for line in text)
    assert not any(line.startswith("│ ") for line in whole)


def test_batches_without_documents_say_so_and_what_cannot_be_named_is_told(store, packed, tmp_path):
    assert "none are stored with these tokens" in printed(store, "--batch", 3)[-1]
    [found] = which(store, "--batch", 12)
    assert (found["documents"], found["rows"][0]["batch"]) == (None, 2)
    [found] = which(store, "--batch", 12, "--text", "--tokenizer", "byte")
    assert [piece["row"] for piece in found["documents"]] == [0, 1, 2, 3]
    assert all("document" not in piece and piece["text"] for piece in found["documents"])
    (tmp_path / "state.json").write_text("{}")
    assert "no batch 30: it has 30" in which(store, "--batch", 30, code=1)
    assert "pass --tokenizer" in which(packed.path, "--batch", 0, "--text", code=2)
    for arguments in (
        (store,),
        (store, store, "--batch", 0),
        (store, "--batch", 0, "--step", 1),
        (store, "--state", tmp_path / "state.json"),
    ):
        assert "pass one STORE and --batch, or --state and --step" in which(*arguments, code=2)
