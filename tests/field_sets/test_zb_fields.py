"""`zb fields`, codes of documents by their metadata, and stores that are replaced while they have field sets."""

import json
import os
import re
import shlex
import shutil

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from commandline import one_error, report_of, run_zb, succeed
from damage import datasets_of

from zb_hdf5 import ArgumentError, ConvertError, Field, Loader, convert, open_corpus, open_field_set, plan_field_set
from zb_hdf5.commands.zb import zb
from zb_hdf5.errors import NotFoundError
from zb_hdf5.field_sets.asked_set import parse_set_fields
from zb_hdf5.field_sets.document_words import make_words
from zb_hdf5.store.set_index import parts_in

LANGUAGES = ["en", "de", "fr", None]


@pytest.fixture
def written(tmp_path):
    """A store with a set of which half is written."""
    np.save(tmp_path / "t.npy", np.arange(64 * 16, dtype=np.uint16).reshape(64, 16))
    convert(tmp_path / "t.npy", "hdf5", tmp_path / "st", batch_size=4)
    with open_field_set(
        tmp_path / "st", "w", {"w": "f4"}, about="token", part_bytes=1100, maker={"model": "m"}
    ) as found:
        for step in found.missing(batch_size=4, quiet=True):
            found.write(step["records"], w=step["tokens"].float())
            if len(step["records"]) and int(step["records"][-1]) == 31:
                break
    return tmp_path / "st"


def finish(path):
    with open_field_set(path, "w", {"w": "f4"}, about="token", maker={"model": "m"}) as found:
        for step in found.missing(batch_size=4, quiet=True):
            found.write(step["records"], w=step["tokens"].float())
        found.finish()


def test_the_commands_tell_how_far_a_set_is_and_end_it(written):
    report = report_of(zb, "fields", "list", written)
    [found] = report["sets"]
    assert (found["name"], found["split"], found["written"], found["records"]) == ("w", "train", 32, 64)
    assert (found["parts"], found["parts_done"], found["finished"]) == (4, 2, False)
    assert found["bound_by"] == "digests"
    text = succeed(zb, "fields", "info", written, "w").stdout
    assert "32 of 64 written" in text
    assert '{"model": "m"}' in text
    done = run_zb("fields", "finish", written, "w")
    assert "expected values for 64 records, 32 records are missing" in one_error(done)
    finish(written)
    assert "64 records" in succeed(zb, "fields", "finish", written, "w").stdout
    assert report_of(zb, "fields", "verify", written, "w")["damaged"] == []
    assert "there is no field set 'x'; of" in one_error(run_zb("fields", "info", written, "x"))


def test_info_and_verify_name_the_sets_of_a_store(written):
    assert report_of(zb, "info", written)["field_sets"] == ["w (train)"]
    text = succeed(zb, "info", written).stdout
    assert re.search(r"field set w \(train\) +w; 32 of 64 records; 4.0 KiB", text)
    assert f"not compared: zb fields verify {written} w" in succeed(zb, "verify", written).stdout


def test_the_line_that_compares_a_set_is_typed(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(64 * 16, dtype=np.uint16).reshape(64, 16))
    convert(tmp_path / "t.npy", "hdf5", tmp_path / "a b's", batch_size=4)
    finish(tmp_path / "a b's")
    [line] = re.findall(r"not compared: (zb .*)", succeed(zb, "verify", tmp_path / "a b's").stdout)
    succeed(zb, *shlex.split(line)[1:])


@pytest.mark.parametrize("away", ["", "below"])
def test_the_sets_of_a_folder_of_arrays_lie_beside_it_however_it_is_named(away, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    (folder / "below").mkdir(parents=True)
    np.save(folder / "t.npy", np.arange(64 * 16, dtype=np.uint16).reshape(64, 16))
    monkeypatch.chdir(folder / away)
    named = ".." if away else "."
    finish(named)
    assert [path.name for path in (tmp_path / "data.fields").iterdir()] == ["w"]
    assert sorted(os.listdir(folder)) == ["below", "t.npy"]
    for path in (named, folder):
        assert "w (train)" in succeed(zb, "fields", "list", path).stdout
        assert "field set w" in run_zb("verify", path, code=6).stdout
    assert "none: /" in succeed(zb, "fields", "list", "/").stdout


def test_a_report_has_the_facts_of_the_sets_of_a_store(written, tmp_path):
    finish(written)
    digest = succeed(zb, "fields", "finish", written, "w").stdout.split()[-1]
    [found] = report_of(zb, "report", written, "-o", tmp_path / "r.html")["field_sets"]
    assert (found["name"], found["written"], found["sha256"]) == ("w", 64, digest)
    page = (tmp_path / "r.html").read_text()
    for text in ("Field sets", "w (train)", "w, float32 a token", "64 of 64 written", digest, "{&quot;model&quot;"):
        assert text in page


def test_a_dry_run_tells_the_parts_and_the_room_of_a_set(written):
    words = ["fields", "make", written, "t"]
    words += [word for each in ("ids=i4:64", "half=bfloat16:64", "r=f8/record") for word in ("--field", each)]
    report = report_of(zb, *words, "--part-bytes", "100k", "--dry-run")
    values = 64 * (16 * 64 * 6 + 8)
    assert (report["records"], report["record_tokens"], report["parts"]) == (64, 16, 4)
    assert report["fields"]["half"] == {"dtype": "<u2", "shape": [64], "allow_nan": False, "kind": "bfloat16"}
    assert report["fields"]["r"]["unit"] == "record"
    assert (report["fits"], report["lack"]) == (True, "")
    assert not (written / "fields/t").exists()
    with open_corpus(written) as corpus:
        of_tokens = parse_set_fields({"ids": ("i4", (64,)), "half": ("bfloat16", (64,))})
        of_records = Field("r", np.dtype("f8"), unit="record", allow_nan=False)
        plan = plan_field_set(corpus, "t", [*of_tokens, of_records], part_bytes="100k")
    assert plan.to_json() == report | {"free": plan.to_json()["free"]}
    succeed(zb, *words, "--part-bytes", "100k", "--maker", "m")
    with open_field_set(written, "t") as made:
        assert made.facts.maker == "m"
        for step in made.missing(quiet=True, batch_size=16):
            ids = np.zeros((*step["tokens"].shape, 64), "i4")
            made.write(step["records"], ids=ids, half=ids.astype("f4"), r=np.zeros(len(ids)))
        made.finish()
    sizes = [path.stat().st_size for path in (written / "fields/t/train").glob("*.values")]
    assert len(sizes) == report["parts"]
    assert values < sum(sizes) <= report["total_bytes"] < 1.3 * sum(sizes)
    assert max(sizes) <= report["largest_part_bytes"]
    assert "exists already" in one_error(run_zb(*words, "--dry-run"))


def test_a_dry_run_of_a_set_that_does_not_fit_ends_with_1(written):
    done = run_zb("fields", "make", written, "t", "--field", "x=f8:9999x20000", "--dry-run", code=1)
    assert re.search(r"does not fit .*: its values take .* bytes, and only .* are free", done.stdout)
    done = run_zb("fields", "make", written, "t", "--field", "x=f8:9999x20000")
    assert "its values take" in one_error(done, 1)
    assert not (written / "fields/t").exists()


@pytest.mark.parametrize(
    "words", [(), ("--meta", "a", "--field", "x=f4"), ("--meta", "a", "--note", "x"), ("--field", "x")]
)
def test_a_set_is_made_of_fields_or_of_codes(written, words):
    run_zb("fields", "make", written, "t", *words, code=2)


def test_a_damaged_record_is_named(written):
    finish(written)
    first, path = parts_in(written / "fields/w/train")[1]
    with h5py.File(path) as h5:
        place = h5["values/w"].id.get_offset() + 2 * 16 * 4  # record 2 of the part
    with open(path, "r+b") as file:
        file.seek(place + 2)
        byte = file.read(1)
        file.seek(place + 2)
        file.write(bytes([byte[0] ^ 4]))
    report = report_of(zb, "fields", "verify", written, "w", code=3)
    assert report["damaged"] == [first + 2]


def test_claims_are_released_and_a_set_is_dropped(written):
    held = open_field_set(written, "w")
    next(held.missing(quiet=True))
    claims = report_of(zb, "fields", "info", written, "w")["claims"]
    assert [claim["first"] for claim in claims] == [32]
    assert f"process {os.getpid()}" in claims[0]["owner"]
    assert "still writes" in one_error(run_zb("fields", "drop", written, "w", "--yes"), 5)
    assert "from record 32" in succeed(zb, "fields", "release", written, "w").stdout
    held.close()
    assert "Aborted" in CliRunner().invoke(zb, ["fields", "drop", str(written), "w"], input="n\n").output
    assert (written / "fields").exists()
    succeed(zb, "fields", "drop", written, "w", "--yes")
    assert not (written / "fields").exists()
    assert "none" in succeed(zb, "fields", "list", written).stdout
    succeed(zb, "verify", written)


def test_a_store_with_sets_is_replaced_only_if_they_are_named(written):
    source = written.with_name("t.npy")
    sets = written / "fields/w/train"
    before = sorted(path.name for path in sets.iterdir())
    with pytest.raises(ConvertError, match="has the field sets w, whose values would be lost"):
        convert(source, "hdf5", written, force=True, batch_size=8)
    done = run_zb("convert", source, written, "--force", "--batch-size", 8)
    assert "pass --drop-field-set w to remove them, too" in one_error(done)
    assert sorted(path.name for path in sets.iterdir()) == before
    succeed(zb, "convert", source, written, "--force", "--batch-size", 8, "--drop-field-set", "w")
    assert not (written / "fields").exists()
    with open_corpus(written) as corpus:
        assert corpus.windows.size == 8


def test_a_repair_leaves_sets_where_they_are(written):
    finish(written)
    (shard, first, _), *_ = datasets_of(written, "batches")
    data = bytearray(shard.read_bytes())
    data[first] ^= 1
    shard.write_bytes(data)
    assert f"w: stay with {written}" in succeed(zb, "repair", written).stdout
    assert (written / "fields/w/train/index.json").exists()


def test_a_rebuilt_index_leaves_sets_alone(written):
    finish(written)
    (written / "shards.json").unlink()
    assert "w: as they were; compared with the tokens" in succeed(zb, "index", "rebuild", written).stdout
    with Loader(written, fields=["w/w"]) as loader:
        for step in loader:
            assert torch.equal(step["w/w"], step["tokens"].float())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    rng = np.random.default_rng(2)
    rows = []
    for number in range(300):
        lang = LANGUAGES[min(3, int(rng.integers(6)) // 2 if number % 5 else 0)]
        rows.append({"text": "y" * int(rng.integers(3, 50)), "id": str(number), "lang": lang})
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(
        folder / "t.jsonl",
        "hdf5",
        folder / "st",
        tokenizer="byte",
        seq_len=64,
        batch_size=4,
        id_column="id",
        metadata_columns=("lang",),
    )
    return folder / "st", [row["lang"] for row in rows]


def test_codes_of_the_metadata_of_documents_come_with_their_segments(texts, tmp_path):
    path, languages = texts
    shutil.copytree(path, tmp_path / "st")
    plan = report_of(zb, "fields", "make", tmp_path / "st", "lang", "--meta", "lang", "--dry-run")
    assert (plan["records"], plan["record_tokens"], plan["parts"]) == (300, 0, 1)
    report = report_of(zb, "fields", "make", tmp_path / "st", "lang", "--meta", "lang")
    assert "lang (train)  code; finished; 3 words: " in succeed(zb, "info", tmp_path / "st").stdout
    counts = {word: languages.count(word) for word in set(languages) - {None}}
    assert report["words"] == sorted(counts, key=counts.get, reverse=True)
    wanted = ("documents", "meta:lang")
    with Loader(tmp_path / "st", documents=wanted, shuffle="records") as loader:
        words = loader.words("lang")
        assert words == report["words"]
        seen = 0
        for step in loader:
            for number, code in zip(step["documents"].tolist(), step["meta:lang"].tolist(), strict=True):
                expected = languages[number] if number >= 0 else None
                assert (words[code] if code >= 0 else None) == expected
                seen += 1
    assert seen > 300
    with Loader(tmp_path / "st", documents=[("meta", "lang")]) as loader:
        assert next(loader)["meta:lang"].dtype == torch.int64


def test_the_documents_of_a_stream_have_codes(tmp_path):
    rows = [{"text": "y" * (9 + number), "lang": "en" if number % 3 else "de"} for number in range(30)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(tmp_path / "t.jsonl", "stream", tmp_path / "st", tokenizer="byte", metadata_columns=("lang",))
    assert report_of(zb, "fields", "make", tmp_path / "st", "lang", "--meta", "lang")["words"] == ["en", "de"]
    with Loader(tmp_path / "st", seq_len=16, batch_size=2, documents=("documents", "meta:lang")) as loader:
        for step in loader:
            expected = [0 if number % 3 else 1 for number in step["documents"].tolist() if number >= 0]
            assert [code for code in step["meta:lang"].tolist() if code >= 0] == expected


def test_what_has_no_codes_is_named(texts, written):
    path, _ = texts
    with pytest.raises(NotFoundError, match="there is no field set 'lang'"):
        Loader(path, documents=("meta:lang",))
    with open_corpus(path) as corpus, pytest.raises(ArgumentError, match="no document has 'nothing'"):
        make_words(corpus, "x", "nothing")
    assert "holds no documents" in one_error(run_zb("fields", "make", written, "x", "--meta", "a"), 1)
