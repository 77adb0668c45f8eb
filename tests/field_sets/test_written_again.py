"""Records that are written again, claims that are let go, and runs that are typed twice."""

import json
import shutil
from itertools import chain, islice

import numpy as np
import pytest
import torch
from commandline import run_zb

from zb_hdf5 import ArgumentError, ChecksumError, Field, Loader, StoreRecords, convert, open_corpus, open_field_set
from zb_hdf5.errors import UnavailableError
from zb_hdf5.field_sets.document_words import make_words
from zb_hdf5.field_sets.part_claim import PartClaim, claim_path
from zb_hdf5.store.value_part import ValuePart

SEQ_LEN = 32
PART_BYTES = 3000  # of 8 records


@pytest.fixture
def written(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 500, (96, SEQ_LEN), dtype=np.uint16)
    np.save(tmp_path / "rows.npy", tokens)
    convert(tmp_path / "rows.npy", "hdf5", tmp_path / "store", batch_size=4, shuffle=False)
    write(tmp_path / "store", lambda tokens: tokens * 2)
    return tmp_path / "store"


def write(path, values, **options):
    """Write all that is missing, or asked for again; return the numbers of the records."""
    seen = []
    with open_field_set(path, "t", {"v": "i8"}, part_bytes=PART_BYTES) as found:
        for step in found.missing(3, quiet=True, **options):
            found.write(step["records"], v=values(step["tokens"]))
            seen += step["records"].tolist()
        found.finish()
    return seen


def values_of(path):
    with StoreRecords(path, fields=["t/v"]) as records:
        return np.stack([record["t/v"] // np.maximum(record["input_ids"], 1) for record in records[:]])


def test_records_are_written_once_more_also_twice_in_one_process(written):
    with open_field_set(written, "t", {"v": "i8"}) as found:
        for factor in (3, 4):
            seen = []
            for step in found.missing(5, quiet=True, overwrite=(10, 30)):
                found.write(step["records"], v=step["tokens"] * factor)
                seen += step["records"].tolist()
            assert seen == [*range(10, 30)]
        assert [*found.missing(5, quiet=True)] == []
        found.finish()
    factors = values_of(written).max(axis=1)
    assert (factors[10:30] == 4).all()
    assert (factors[:10] == 2).all()
    assert (factors[30:] == 2).all()


def test_a_range_that_this_process_has_is_written_once_more(written):
    with open_field_set(written, "t", {"v": "i8"}) as found:
        steps = found.missing(1, quiet=True, overwrite=(0, 4))
        assert next(steps)["records"].tolist() == [0]  # the range of record 0 is claimed, and not written
        again = [step["records"].tolist() for step in found.missing(2, quiet=True, overwrite=(2, 6))]
        assert [*chain(*again)] == [0, 1, 2, 3, 4, 5]


def test_of_several_jobs_each_writes_those_in_its_own_parts_once_more(written):
    seen = [write_part(written, job) for job in range(3)]
    assert sorted(chain(*seen)) == [*range(96)]
    assert all(20 < len(each) < 45 for each in seen)


def write_part(path, job):
    seen = []
    with open_field_set(path, "t", {"v": "i8"}) as found:
        for step in found.missing(3, quiet=True, overwrite=(0, 96), job=job, num_jobs=3):
            found.write(step["records"], v=step["tokens"] * 5)
            seen += step["records"].tolist()
    return seen


@pytest.mark.parametrize("marked", [[0], [1], [0, 1, 2], [3], [0, 2]])
def test_the_first_window_of_a_stream_of_which_some_records_are_written_goes_on(marked, tmp_path):
    np.save(tmp_path / "flat.npy", np.arange(1000, dtype=np.uint16))
    how = {"fields": {"v": "i8"}, "seq_len": 64, "stride": 16}
    with open_field_set(tmp_path / "flat.npy", "t", **how) as found:
        window = next(found.missing(1, quiet=True))
        found.write(window["records"], v=window["tokens"] * 2)
        unmark(found, [record for record in range(4) if record not in marked])
    seen = []
    with open_field_set(tmp_path / "flat.npy", "t", **how) as found:
        for step in found.missing(4, quiet=True):
            found.write(step["records"], v=step["tokens"] * 2)
            seen += step["records"].tolist()
        assert seen[0] == 0
        found.finish()
    with Loader(tmp_path / "flat.npy", batch_size=2, seq_len=50, fields=["t/v"]) as loader:
        for step in loader:
            assert torch.equal(step["t/v"], step["tokens"] * 2)


def unmark(found, records):
    """Take back the marks of records, as a process does not have them that was killed before."""
    [path] = found.folder.glob("*.values")
    part = ValuePart(path, found.facts, writable=True)
    part.unmark(np.array(records, np.int64))
    part.close()


def test_the_values_of_a_claim_that_was_released_are_compared_before_they_count(written):
    """Marks may be ahead of values after a failure of a host."""
    with open_field_set(written, "t", {"v": "i8"}) as found:
        for step in found.missing(1, quiet=True, overwrite=(0, 8)):
            found.write(step["records"], v=step["tokens"] * 2)
            if 6 in step["records"]:
                break
        part = found.folder / "part-000000000000.values"
        layout = ValuePart(part, found.facts)
        with open(part, "r+b") as file:  # record 2 has a mark, and lost its values
            file.seek(layout.layout.values["v"] + 2 * SEQ_LEN * 8)
            file.write(b"\xff" * 8)
        layout.close()
        assert "released" in run_zb("fields", "release", written, "t").stdout
        with pytest.raises(UnavailableError, match="taken over"):
            found.write([7], v=np.zeros((1, SEQ_LEN), np.int64))
    assert run_zb("fields", "release", written, "t").stdout.split() == ["released", "none"]
    assert write(written, lambda tokens: tokens * 2) == [2, 7]
    assert (values_of(written).max(axis=1) == 2).all()


def test_claims_of_one_host_or_job_alone_are_released(written, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    part = written / "fields/t/train/part-000000000000.values"
    claim = PartClaim.take(part)
    for option in (("--host", "elsewhere"), ("--job", "78")):
        assert run_zb("fields", "release", written, "t", *option).stdout.split() == ["released", "none"]
    claim.hold()
    assert "of job 77" in run_zb("fields", "release", written, "t", "--job", "77").stdout
    with pytest.raises(UnavailableError):
        claim.hold()
    claim.release()
    taken = PartClaim.take(part)
    assert taken.is_taken_over
    taken.release()
    assert not claim_path(part).exists()


def test_a_set_is_not_removed_with_files_that_are_not_its_own(written, tmp_path):
    other = tmp_path / "mine" / "deep"
    shutil.copytree(written / "fields/t/train", other)
    (other / "notes.txt").write_text("mine")
    told = run_zb("fields", "drop", written, "t", "--path", other, "--yes", code=2).stderr
    assert "has files that are not of the field set: notes.txt" in told
    assert len([*other.iterdir()]) > 3
    (other / "notes.txt").unlink()
    run_zb("fields", "drop", written, "t", "--path", other, "--yes")
    assert not other.exists()
    assert other.parent.exists(), "the folder above is the user's own"
    run_zb("fields", "drop", written, "t", "--yes")
    assert not (written / "fields").exists()


def test_codes_of_documents_are_made_again_after_a_run_that_was_ended(tmp_path, monkeypatch):
    rows = [json.dumps({"text": f"document {number}", "lang": "en" if number % 3 else "de"}) for number in range(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    how = {"tokenizer": "byte", "seq_len": 64, "batch_size": 2, "metadata_columns": ("lang",)}
    convert(tmp_path / "t.jsonl", "hdf5", tmp_path / "st", **how)
    monkeypatch.setattr("zb_hdf5.field_sets.document_words.READ_AT_ONCE", 9)
    with open_corpus(tmp_path / "st") as corpus:
        with pytest.MonkeyPatch.context() as ended:
            ended.setattr("zb_hdf5.field_sets.field_set.FieldSet.finish", lambda found: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                make_words(corpus, "lang", "lang")
        for _ in range(2):
            assert make_words(corpus, "lang", "lang") == ["en", "de"]


def test_a_finished_set_is_read_by_its_index_also_where_records_may_be_missing(written, monkeypatch):
    monkeypatch.setattr("zb_hdf5.store.found_set.parts_in", lambda folder: 1 / 0)
    with open_corpus(written) as corpus, Loader(corpus.with_fields("t", allow_missing={}), fields=["t/v"]) as loader:
        for step in loader:
            assert torch.equal(step["t/v"], step["tokens"] * 2)


def test_a_set_of_another_name_or_other_parts_is_named(written):
    folder = written / "fields/t/train"
    with open_corpus(written) as corpus:
        with pytest.raises(ArgumentError, match="expected the field set 'other', found 't'"):
            corpus.with_fields("other", path=folder)
        with pytest.raises(ArgumentError, match="expected the field set 'other', found 't'"):
            open_field_set(corpus, "other", None, path=folder)
        with pytest.raises(ArgumentError, match=r"has parts of 8 records, found part_bytes=30000"):
            open_field_set(corpus, "t", {"v": "i8"}, part_bytes=30_000)


def test_a_fill_of_bfloat16_is_rounded_as_torch_rounds():
    field = Field("x", np.dtype("u2"), kind="bfloat16", fill=0.0)
    for value in (0.1, 1 / 3, 3.3895314e38, -7.77, 1e-40, float("inf"), 65_535.9):
        expected = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert field.filled(value) == expected, value
    assert torch.from_numpy(field.filled(float("nan")).view(np.int16)).view(torch.bfloat16).isnan()


def test_the_maker_of_values_never_sees_a_damaged_token(written):
    [shard] = written.glob("shard-*.h5")
    with open_corpus(written) as corpus:
        ids = corpus.tokens[0 : 96 * SEQ_LEN].tobytes()
    data = bytearray(shard.read_bytes())
    data[data.index(ids[:64]) + 40 * SEQ_LEN * 2] ^= 1  # a token of record 40
    shard.write_bytes(data)
    with open_field_set(written, "other", {"v": "i8"}) as found:
        with pytest.raises(ChecksumError):
            seen = [step["records"] for step in found.missing(3, quiet=True)]
        seen = [step["records"].tolist() for step in islice(found.missing(3, quiet=True), 12)]
    assert max(chain(*seen)) < 40
