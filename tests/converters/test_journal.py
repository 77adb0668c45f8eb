"""The journal of an interrupted conversion is not believed: junk in it costs shards, never a wrong store."""

import contextlib
import hashlib
import json
import shutil

import numpy as np
import pytest
from commandline import run, succeed
from contents import files_in
from contract import is_refused
from golden import DATA
from hypothesis import given
from hypothesis import strategies as st
from interrupted import Failing, Stops

from examples import examples
from zb_hdf5 import ConvertError, ShardIndex, ZbError, convert, verify_store
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.conversion import WHOLE, ShardRange
from zb_hdf5.converters.journal import journal_name, read_journal

WRITTEN = DATA / "trainers"
NUM_SHARDS, NUM_FINISHED = 4, 3
HOSTILE = [
    None, True, -1, 3.5, 2**70, float("nan"), float("inf"), "", "val", "x", "../../etc/passwd", "\ud800", [], {}, [[]],
    [[1, 2, 3]], {"batches": [[0, 0, 10**18]]}, {"a": None},
]  # fmt: skip


def save_records(path):
    np.save(path, np.random.default_rng(1).integers(0, 99, (96, 16), dtype="<u2"))
    return {"batch_size": 4, "seq_len": 16, "seed": 42, "shards": NUM_SHARDS}


def save_documents(path):
    for number in range(NUM_SHARDS):
        lines = [json.dumps({"text": f"document {number} {row}"}) for row in range(9)]
        path.with_name(f"{number}.jsonl").write_text("\n".join(lines))
    return {"tokenizer": "byte"}


class Interrupted:
    """An interrupted conversion, of which some files are finished, and the result of an undisturbed one."""

    def __init__(self, folder, kind):
        self.folder, self.is_stream = folder, kind == "stream"
        folder.mkdir()
        self.how = save_documents(folder / "in.npy") if self.is_stream else save_records(folder / "in.npy")
        self.convert(folder / "whole")
        self.whole = files_in(folder / "whole")
        with contextlib.suppress(Stops):
            self.convert(folder / "out", engine=Failing(NUM_FINISHED), workers=None)
        self.kept = folder / "kept"
        shutil.move(folder / "out.partial", self.kept)
        self.lines = (self.kept / journal_name(WHOLE)).read_bytes().split(b"\n")[:-1]
        assert len(self.lines) == 1 + NUM_FINISHED

    def convert(self, destination, **how):
        sources = sorted(self.folder.glob("*.jsonl")) if self.is_stream else self.folder / "in.npy"
        return convert(sources, "stream" if self.is_stream else "hdf5", destination, **self.how, **{"workers": 1} | how)

    def resume_with(self, content):
        """Resume with another content of the journal; return the one error, or None where the result is right."""
        partial = self.folder / "out.partial"
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.kept, partial)
        (partial / journal_name(WHOLE)).write_bytes(content)
        failed = None
        try:
            report = self.convert(self.folder / "out", resume=True)
        except ZbError as error:
            failed = error
        if failed is not None:
            assert not (self.folder / "out").exists()
            assert "force=True" in str(failed)
            return failed
        assert files_in(self.folder / "out") == self.whole
        self.kept_shards = report.kept.shards
        return None


@pytest.fixture(scope="module", params=["records", "stream"])
def interrupted(request, tmp_path_factory):
    return Interrupted(tmp_path_factory.mktemp("journal") / request.param, request.param)


def sealed(content):
    """Return a line with the digest that a journal gives it."""
    body = json.dumps(content).removesuffix("}")
    return f'{body}, "check": "{hashlib.sha256(body.encode()).hexdigest()}"}}'.encode()


def opened(line):
    content = json.loads(line)
    del content["check"]
    return content


def test_lines_are_sealed_by_a_digest_and_all_are_kept(interrupted):
    assert [sealed(opened(line)) for line in interrupted.lines] == interrupted.lines
    assert interrupted.resume_with(b"\n".join([*interrupted.lines, b""])) is None
    assert interrupted.kept_shards == NUM_FINISHED


def changed(line, key, value):
    """Return the content of a line with one value changed, of the entry if that has the key."""
    content = opened(line)
    (content["entry"] if key in content["entry"] else content)[key] = value
    return content


@pytest.mark.parametrize("seal", [sealed, lambda content: json.dumps(content).encode()], ids=["sealed", "without"])
@pytest.mark.parametrize(("key", "value"), [
    ("split", "val"), ("path", "../../etc/passwd"), ("path", "shard-00001-of-00004.h5"), ("number", 2), ("number", 99),
])  # fmt: skip
@pytest.mark.thin
def test_path_and_split_are_those_of_the_plan(key, value, seal, interrupted):
    head, first, *rest = interrupted.lines
    lines = [head, *rest, seal(changed(first, key, value))]
    assert interrupted.resume_with(b"\n".join([*lines, b""])) is None
    assert interrupted.kept_shards == NUM_FINISHED - 1


@pytest.mark.parametrize("interrupted", ["records"], indirect=True)
@pytest.mark.parametrize(("key", "value"), [("num_batches", 3), ("token_count", 5), ("document_count", 7)])
def test_counts_are_those_of_the_plan(key, value, interrupted):
    head, first, *rest = interrupted.lines
    assert interrupted.resume_with(b"\n".join([head, sealed(changed(first, key, value)), *rest, b""])) is None
    assert interrupted.kept_shards == NUM_FINISHED - 1


@pytest.mark.parametrize("junk", [b"{}", b"[]", b"7", b"null", b"", b"\xff\x00", b"[" * 200_000, b'{"a":' * 99_999])
@pytest.mark.thin
def test_a_line_of_junk_costs_its_shard_and_a_first_line_of_junk_is_refused(junk, interrupted):
    head, first, *rest = interrupted.lines
    assert interrupted.resume_with(b"\n".join([head, junk, *rest, b""])) is None
    assert interrupted.kept_shards == NUM_FINISHED - 1
    error = interrupted.resume_with(b"\n".join([junk, first, *rest, b""]))
    assert "not a journal" in str(error)


def test_lines_without_a_digest_are_not_believed(interrupted):
    head, *rest = interrupted.lines
    without = [json.dumps(opened(line)).encode() for line in rest]
    assert interrupted.resume_with(b"\n".join([head, *without, b""])) is None
    assert interrupted.kept_shards == 0
    without = json.dumps(opened(head)).encode()
    assert "its first line is damaged" in str(interrupted.resume_with(b"\n".join([without, *rest, b""])))


@st.composite
def journals(draw, lines):
    """Return the lines of a journal, some of which are junk."""
    lines = list(lines)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["value", "cut", "bytes", "gone", "twice", "swapped"]))
        line = lines[number]
        if kind == "value" and line.startswith(b"{"):
            lines[number] = draw(hostile(line))
        elif kind == "cut":
            lines[number] = line[: draw(st.integers(0, len(line)))]
        elif kind == "bytes" and line:
            place = draw(st.integers(0, len(line) - 1))
            lines[number] = line[:place] + draw(st.binary(max_size=9)) + line[place + 1 :]
        elif kind == "gone" and len(lines) > 1:
            del lines[number]
        elif kind == "twice":
            lines.append(line)
        elif kind == "swapped":
            lines[0], lines[number] = lines[number], lines[0]
    end = draw(st.sampled_from([b"\n", b"\n", b"", b"\n\n"]))
    return b"\n".join(lines) + end


@st.composite
def hostile(draw, line):
    """Return a line in which one value is another one, or is not there; its digest is the old one."""
    try:
        content = json.loads(line)
    except ValueError:
        return line
    target, key = None, None
    inner = content
    while isinstance(inner, (dict, list)) and inner and (target is None or draw(st.booleans())):
        target = inner
        key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        inner = inner[key]
    if target is None:
        return line
    if draw(st.booleans()) and isinstance(target, dict):
        del target[key]
    else:
        target[key] = draw(st.sampled_from(HOSTILE))
    return json.dumps(content).encode("ascii")


@examples(60)
@given(data=st.data())
def test_whatever_a_journal_has_the_result_is_right_or_one_message(data, interrupted):
    interrupted.resume_with(data.draw(journals(interrupted.lines)))


def test_a_merge_takes_path_and_split_from_the_plan(tmp_path):
    how = save_records(tmp_path / "in.npy")
    for job in range(2):
        convert(tmp_path / "in.npy", "hdf5", tmp_path / "out", **how, shard_range=(job, 2))
    journal = tmp_path / "out.partial" / journal_name(ShardRange(1, 2))
    head, first, *rest = journal.read_bytes().split(b"\n")[:-1]
    for content in (sealed(changed(first, "split", "val")), first.replace(b'"train"', b'"val"'), b"{}"):
        assert content != first
        journal.write_bytes(b"\n".join([head, content, *rest, b""]))
        assert len(read_journal(journal).finished) == 1
        said = run(zb, "index", "merge", tmp_path / "out")
        assert said.exit_code == 1
        assert "1 of 4 shards are missing, of part 1 of 2" in said.stderr
    later = opened(head)
    later["plan"]["version"] = 99
    journal.write_bytes(b"\n".join([sealed(later), first, *rest, b""]))
    is_refused(ConvertError, lambda: convert(tmp_path / "in.npy", "hdf5", tmp_path / "out", **how, resume=True))
    convert(tmp_path / "in.npy", "hdf5", tmp_path / "out", **how, shard_range=(1, 2), force=True)
    succeed(zb, "index", "merge", tmp_path / "out")
    assert set(ShardIndex.load(tmp_path / "out").table.values["split"]) == {"train"}
    assert {report.outcome.value for report in verify_store(tmp_path / "out")} == {"verified"}


# --- an earlier version -------------------------------------------------------------------------------------------


SHAPE = {"seq_len": 64, "batch_size": 4, "shards": 3, "seed": 5}


def plan_of_earlier(files, total_records):
    """Return the plan of streams as a version wrote it that cut the records of each file by itself."""
    meta = {
        "batch_size": 4, "seq_len": 64, "dtype": "uint16", "seed": 5, "total_records": total_records,
        "document_count": 0, "vocab_size": 0, "tokenizer": "", "boundary_token_id": -1, "layout": "batches",
        "fields": {}, "codec": "none", "field": None,
    }  # fmt: skip
    names = [str(path) for path in files]
    return {
        "version": 2, "target": "hdf5", "meta": meta, "shuffle": "global",
        "source": {"format": "npy", "files": names, "remainder": "drop", "pad_id": 0},
        "identity": {}, "cuts": [[0, 2], [2, 4], [4, 7]], "has_pieces": False, "documents": [],
        "files": {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files},
        "planned": [
            [f"shard-{number:05}-of-00003.h5", "train", count, 256 * count, -1]
            for number, count in enumerate((2, 2, 3))
        ],
    }  # fmt: skip


def stopped_by_earlier(folder, lengths):
    """Stop a conversion of streams after its first shard, with the journal of an earlier version."""
    files = [folder / "in" / f"{number}.npy" for number in range(len(lengths))]
    files[0].parent.mkdir()
    for number, (path, length) in enumerate(zip(files, lengths, strict=True)):
        np.save(path, np.arange(length, dtype="<u2") + 1000 * number)
    with pytest.raises(Stops):
        convert(folder / "in", "hdf5", folder / "out", engine=Failing(1), **SHAPE)
    journal = folder / "out.partial" / journal_name(WHOLE)
    _, done = journal.read_bytes().splitlines()
    plan = plan_of_earlier(files, sum(length // 64 for length in lengths))
    journal.write_bytes(sealed({"unit": "shards", "plan": plan}) + b"\n" + done + b"\n")


def test_a_journal_of_an_earlier_version_goes_on_where_no_record_is_cut_by_the_end_of_a_file(tmp_path):
    stopped_by_earlier(tmp_path, [640, 640, 650])
    report = convert(tmp_path / "in", "hdf5", tmp_path / "out", resume=True, workers=1, **SHAPE)
    assert report.kept.shards == 1
    convert(tmp_path / "in", "hdf5", tmp_path / "whole", workers=1, **SHAPE)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


@pytest.mark.parametrize("lengths", [[650, 640, 630], [650, 640, 640]], ids=["more records", "as many records"])
def test_a_journal_of_an_earlier_version_is_refused_where_records_are_cut_otherwise(lengths, tmp_path):
    stopped_by_earlier(tmp_path, lengths)
    is_refused(
        ConvertError,
        lambda: convert(tmp_path / "in", "hdf5", tmp_path / "out", resume=True, workers=1, **SHAPE),
        match="out.partial: holds another conversion: its .* is .*, here it is .*; .* start over with force=True",
    )
    convert(tmp_path / "in", "hdf5", tmp_path / "out", force=True, workers=1, **SHAPE)
    assert len(ShardIndex.load(tmp_path / "out").shards) == 3


def without_its_indexes(plan):
    """Return the plan of packed documents as a version wrote it that looked at the files of ids alone."""
    files = {path: state for path, state in plan["files"].items() if path.endswith((".bin", ".ds"))}
    assert len(files) < len(plan["files"])
    return {**plan, "files": files}


@pytest.mark.parametrize(("name", "index"), [("megatron", ".idx"), ("datatrove", ".ds.index")])
def test_a_journal_without_the_states_of_indexes_is_of_an_earlier_version(name, index, tmp_path):
    shutil.copytree(WRITTEN / name / "uint16", tmp_path / "in", ignore=shutil.ignore_patterns("truth.json"))
    how = {"seq_len": 16, "batch_size": 4, "packing": "best-fit", "shards": 3}
    with pytest.raises(Stops):
        convert(tmp_path / "in", "hdf5", tmp_path / "out", engine=Failing(1), **how)
    journal = tmp_path / "out.partial" / journal_name(WHOLE)
    head, done = journal.read_bytes().splitlines()
    plan = without_its_indexes(opened(head)["plan"])
    journal.write_bytes(sealed({"unit": "shards", "plan": plan}) + b"\n" + done + b"\n")
    before = files_in(tmp_path / "out.partial")
    is_refused(
        ConvertError,
        lambda: convert(tmp_path / "in", "hdf5", tmp_path / "out", resume=True, **how),
        match=f"out.partial: holds another conversion: an earlier version began it, whose plan lacks .*{index}; "
        "start over with force=True",
    )
    assert files_in(tmp_path / "out.partial") == before
    convert(tmp_path / "in", "hdf5", tmp_path / "out", force=True, workers=1, **how)
    assert len(ShardIndex.load(tmp_path / "out").shards) == 3
