"""`zb verify` compares every fact of an index with the files: none that was edited by hand passes."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from commandline import report_of, run, succeed
from contract import random_tokens
from damage import flip_stored, write_batches, write_streams

from zb_hdf5 import Loader, ReadAs, errors, open_corpus, verify_store, write_digests
from zb_hdf5 import convert as make
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.unchecked_file import open_chunks

#: Keys of an index that no file need have: free words, and facts of the whole that only the index may know.
FREE = {"check", "source", "shuffle", "complete", "total_records", "document_count", "vocab_size"}


def text_store(folder):
    """Write packed rows of two splits, with documents."""
    lines = [json.dumps({"text": f"document {number} " * 9, "id": number}) for number in range(90)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    how = ("--tokenizer", "byte", "--batch-size", 4, "--seq-len", 64, "--id-column", "id", "--val-fraction", 0.3)
    succeed(convert, "jsonl-to-hdf5", folder / "in.jsonl", folder / "store", *how, "--quiet")
    return folder / "store"


def records(folder, target="hdf5", *options):
    """Write rows without documents."""
    np.save(folder / "in.npy", np.random.default_rng(3).integers(0, 99, (48, 16), dtype="<u2"))
    how = ("--batch-size", 4, "--seq-len", 16, "--shards", 2)
    succeed(convert, f"npy-to-{target}", folder / "in.npy", folder / "store", *how, *options, "--quiet")
    return folder / "store"


KINDS = {
    "text": text_store,
    "fields": lambda folder: write_batches(folder)[0],
    "streams": lambda folder: write_streams(folder)[0],
    "batch": lambda folder: records(folder, "batch"),
    "compressed": lambda folder: records(folder, "hdf5", "--codec", "gzip"),
}


@pytest.fixture(params=KINDS)
def any_store(request, tmp_path):
    return KINDS[request.param](tmp_path)


def facts_in(value, keys=()):
    """Yield the keys of every number, text and truth value of an index that a file has, too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if keys or key not in FREE:
                yield from facts_in(inner, (*keys, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from facts_in(inner, (*keys, number))
    elif value is not None:
        yield keys


def others(value):
    """Return values of the same type that are not the right one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if value in ("train", "val"):
        return [{"train": "val", "val": "train"}[value]]
    if len(value) == 64:
        return ["0123456789abcdef" * 4]
    return ["other", f"{value}x"]


def edited(content, keys, value):
    """Return an index, of which one value is another one."""
    changed = target = json.loads(json.dumps(content))
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    changed.pop("check")
    return json.dumps(changed)


def outcome(store):
    """Return whether a store is verified, in the words of its reports; an index that is none is refused."""
    try:
        return {report.outcome.value for report in verify_store(store)}
    except errors.FormatError:
        return {"bad"}


#: The value of a key that means: not known, as an edit, or as the fact that a file does not have.
NOT_KNOWN_IN = {"crc32": -1, "document_count": -1, "runs": -1, "bytes": 0, "seed": 0}


def is_free(store, keys, old, new):
    """Return whether there is nothing to compare an edit with."""
    key = keys[-2] if isinstance(keys[-1], int) else keys[-1]
    no_split = key == "split" and list(store.glob("*.batch"))  # such a file cannot name it
    return NOT_KNOWN_IN.get(key, ()) in (old, new) or no_split


def test_an_index_that_was_edited_by_hand_is_not_verified(any_store, thinned):
    content = json.loads((any_store / INDEX_NAME).read_text())
    assert outcome(any_store) == {"verified"}
    edits = [(keys, value) for keys in facts_in(content) for value in others(value_at(content, keys))]
    passed = []
    for keys, value in thinned(edits, 80):
        if is_free(any_store, keys, value_at(content, keys), value):
            continue
        (any_store / INDEX_NAME).write_text(edited(content, keys, value))
        if "bad" not in outcome(any_store):
            passed.append((keys, value_at(content, keys), value))
    assert passed == []


def value_at(content, keys):
    for key in keys:
        content = content[key]
    return content


def test_a_shard_without_its_crc32_file_is_not_verified_for_no_reader_opens_it(tmp_path):
    store = records(tmp_path, "batch")
    shard = sorted(store.glob("*.batch"))[0]
    shard.with_name(f"{shard.name}.crc32").unlink()
    with pytest.raises(errors.ChecksumError), Loader(store, rank=0, world_size=1) as loader:
        list(loader)
    assert outcome(store) == {"verified", "unverified"}
    result = run(zb, "verify", store)
    assert result.exit_code == 6
    assert f"{shard.name}.crc32 is missing" in result.stdout + result.stderr
    succeed(zb, "index", "crc32", shard)
    assert outcome(store) == {"verified"}
    with Loader(store, rank=0, world_size=1) as loader:
        assert len(list(loader)) > 0


@pytest.mark.parametrize(("kind", "section"), [("text", "pieces"), ("fields", "fields"), ("streams", "documents")])
def test_an_index_without_a_section_that_its_shards_have_is_not_verified(kind, section, tmp_path):
    store = KINDS[kind](tmp_path)
    content = json.loads((store / INDEX_NAME).read_text())
    del content["check"], content[section]
    (store / INDEX_NAME).write_text(json.dumps(content))
    assert "bad" in outcome(store)


def test_a_wrong_crc32_in_the_index_is_named_and_a_rebuilt_index_heals_it(tmp_path):
    store = records(tmp_path)
    content = json.loads((store / INDEX_NAME).read_text())
    (store / INDEX_NAME).write_text(edited(content, ("shards", "crc32", 1), 7))
    with pytest.raises(errors.ChecksumError), Loader(store, rank=0, world_size=1) as loader:
        list(loader)
    result = run(zb, "verify", store)
    assert result.exit_code == 3
    assert "shards.json has crc32 7, the file has " in result.stderr + result.stdout
    succeed(zb, "index", "rebuild", store, "--force")
    succeed(zb, "verify", store)


def test_of_many_shards_the_text_names_the_bad_ones_and_counts_the_others(tmp_path, write_store):
    tokens = random_tokens(8, 4, 64)
    store = write_store(tmp_path / "store", tokens, range(1, 8))
    lines = succeed(zb, "verify", store).stdout.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"shards +8 of 8 verified: 8 batches \(crc32, .*\)", lines[1])
    flip_stored(store / "shard-00003.h5", tokens[3])
    (store / "shard-00005.h5").unlink()
    result = run(zb, "verify", store)
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "path", "shard-00003.h5", "shard-00005.h5", "shards", "result"
    ]  # fmt: skip
    assert "6 of 8 verified: 6 batches" in result.stdout
    assert len(report_of(zb, "verify", store, code=result.exit_code)["files"]) == 8


@pytest.mark.parametrize("kind", ["fields", "streams"])
def test_progress_has_the_fields_and_ends_at_the_total_behind_a_bad_shard_and_one_that_is_gone(kind, tmp_path):
    store = KINDS[kind](tmp_path)
    seen, totals = [], []
    how = {"progress": seen.append, "announce": totals.append, "workers": 1}
    assert {report.outcome for report in verify_store(store, **how)} == {"verified"}
    assert [sum(seen)] == totals
    assert max(seen) < totals[0]
    shards = sorted(store.glob("s*.h5"))
    with open_chunks(shards[0]) as reader:
        stored = next(iter(reader.groups()))[1][0].copy()
    flip_stored(shards[0], stored, mask=4)
    shards[1].unlink()
    seen.clear()
    assert {report.outcome for report in verify_store(store, **how)} > {"bad"}
    assert [sum(seen)] * 2 == totals


#: Verifies a store, and again as another user, who may not read one shard; modules are read by the first user.
AS_NOBODY = """
import os, sys
from zb_hdf5.commands.zb import zb
store, shard = sys.argv[1:]
zb(["verify", store, "--quiet"], standalone_mode=False)
os.chmod(shard, 0)
os.setegid(65534); os.seteuid(65534)
zb(["verify", store])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("any_store", ["text", "batch"], indirect=True)
def test_a_shard_that_may_not_be_read_is_not_called_damaged(any_store, tmp_path):
    tmp_path.chmod(0o755)
    shard = next(path for path in sorted(any_store.iterdir()) if path.suffix in (".h5", ".batch"))
    command = [sys.executable, "-c", AS_NOBODY, any_store.name, shard]
    ended = subprocess.run(command, cwd=any_store.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == errors.UnavailableError.exit_code
    assert "this user may not read it" in ended.stderr
    assert "zb repair" not in ended.stderr + ended.stdout
    shard.chmod(0o644)
    assert {report.outcome for report in verify_store(any_store)} == {"verified"}


def test_a_corpus_or_batches_are_verified_as_they_were_opened(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(100, dtype=np.uint16))
    np.save(tmp_path / "val.npy", np.arange(50, dtype=np.uint16))
    write_digests(tmp_path, tmp_path / "made.json")
    read_as = ReadAs(digests=tmp_path / "made.json")
    with open_corpus(tmp_path, split="val", read_as=read_as) as corpus:
        for source in (corpus, corpus.batches(2, 5)):
            reports = verify_store(source)
            assert [(report.path, report.checks) for report in reports] == [
                (str(tmp_path / "val.npy"), ["crc32", "sha256"])
            ]
        for given in ({"split": "train"}, {"read_as": ReadAs(source_dtype="uint16")}):
            name = next(iter(given))
            with pytest.raises(errors.ArgumentError, match=f"{name}=.* is chosen when a corpus is opened"):
                verify_store(corpus, **given)
    store = tmp_path / "store"
    np.save(tmp_path / "rows.npy", np.arange(4000, dtype=np.uint16).reshape(-1, 8))
    make(tmp_path / "rows.npy", "hdf5", store, batch_size=4, val_fraction=0.3)
    with open_corpus(store) as corpus:
        assert verify_store(corpus) == verify_store(store)
        with corpus.split("val") as held_out:
            assert verify_store(held_out) == verify_store(store, split="val")
        flip_stored(corpus.files[-1].path, corpus.tokens[-8:])
        assert [report.problem is not None for report in verify_store(corpus)].count(True) == 1
