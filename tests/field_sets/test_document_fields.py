"""Values of field sets in steps of whole documents, and in records for grain: each is that of its token or document."""

import json

import numpy as np
import pytest
import torch

from zb_hdf5 import (
    ArgumentError,
    DocumentLoader,
    Field,
    IncompleteError,
    ReadAs,
    StoreRecords,
    convert,
    open_corpus,
    open_field_set,
)

WINDOW = 16


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """A stream of 60 documents, no two of whose tokens are equal, with a set of each unit."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 40, 60)
    tokens = rng.permutation(np.arange(1, 60_000))[: lengths.sum()]
    rows = [{"input_ids": each.tolist()} for each in np.split(tokens, np.cumsum(lengths)[:-1])]
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(folder / "docs.jsonl", "stream", folder / "stream", vocab_size=60_000)
    write(folder / "stream", "said", [Field("ids", np.dtype("i4"), (2,), fill=-7)], lambda ids: {"ids": of_ids(ids)})
    weight = Field("weight", np.dtype("f8"), fill=-1.5)
    write(folder / "stream", "w", [weight], lambda ids: {"weight": ids.astype(np.float64)}, about="token")
    write(
        folder / "stream",
        "half",
        {"logits": "bfloat16"},
        lambda ids: {"logits": torch.from_numpy(ids / 3.0).bfloat16()},
    )
    of_window = [Field("reward", np.dtype("f8"), unit="record")]
    write(folder / "stream", "rewards", of_window, lambda ids: {"reward": ids.sum(axis=1).astype(np.float64)})
    with open_field_set(
        folder / "stream", "quality", [Field("score", np.dtype("i8"), (2,), unit="document", fill=-9)]
    ) as made:
        for numbers in made.missing_records(7, quiet=True):
            made.write(numbers, score=np.stack([numbers, lengths[numbers]], axis=1))
        made.finish()
    return folder / "stream"


def of_ids(ids):
    return np.stack([ids * 2, ids * 2 + 1], axis=-1).astype(np.int32)


def write(path, name, fields, values, **options):
    with open_field_set(path, name, fields, seq_len=WINDOW, **options) as made:
        for step in made.missing(4, quiet=True):
            made.write(step["records"], **values(step["tokens"].numpy()))
        made.finish()


WAYS = {
    "pad": {"collate": "pad", "batch_size": 7},
    "padded to 8": {"collate": ("pad", 8), "batch_size": 7},
    "truncated": {"collate": "pad", "batch_size": 7, "max_tokens": (10, "truncate")},
    "pack": {"collate": ("pack", 8), "max_tokens": 64},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verify", ["auto", "none"])
def test_each_value_in_steps_of_documents(way, verify, stream):
    fields = {"said": "said/ids", "w": "w/weight", "half": "half/logits", "score": "quality/score"}
    how = {"fields": fields, "targets": True, "pad_token_id": 0, "verify": verify}
    with open_corpus(stream) as corpus:
        lengths = np.diff(corpus.doc_offsets.astype(np.int64))
    steps = 0
    with DocumentLoader(stream, **WAYS[way], **how) as loader:
        for step in loader:
            tokens, targets = step["tokens"].numpy(), step["targets"].numpy()
            there = tokens > 0
            np.testing.assert_array_equal(step["said"].numpy()[there], of_ids(tokens[there]))
            assert (step["said"].numpy()[~there] == -7).all()
            assert step["half"].dtype == torch.bfloat16
            assert torch.equal(step["half"][there], torch.from_numpy(tokens[there] / 3.0).bfloat16())
            is_target = targets != -100
            assert is_target.any()
            np.testing.assert_array_equal(step["w"].numpy()[is_target], targets[is_target])
            assert (step["w"].numpy()[~is_target] == -1.5).all()
            numbers = step["documents"].numpy()
            known = numbers >= 0
            expected = np.stack([numbers, lengths[numbers]], axis=1)
            np.testing.assert_array_equal(step["score"].numpy()[known], expected[known])
            assert (step["score"].numpy()[~known] == -9).all()
            steps += 1
    assert steps > 3


def test_without_targets_a_value_about_the_token_lies_at_its_token(stream):
    with DocumentLoader(stream, collate="pad", batch_size=5, fields=["w/weight"]) as loader:
        step = next(iter(loader))
    there = step["tokens"] > 0
    assert torch.equal(step["w/weight"][there], step["tokens"][there].double())


def test_a_value_of_each_window_is_refused_for_documents(stream):
    with pytest.raises(ArgumentError, match="a value for each window of the stream, and documents are none"):
        DocumentLoader(stream, collate="pad", batch_size=5, fields=["rewards/reward"])


@pytest.fixture(scope="module")
def stored_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    tokens = np.random.default_rng(4).permutation(2**16)[: 64 * WINDOW].astype(np.uint16)
    np.save(folder / "rows.npy", tokens.reshape(-1, WINDOW))
    convert(folder / "rows.npy", "hdf5", folder / "store", batch_size=8)
    with open_field_set(folder / "store", "r", [Field("reward", np.dtype("f8"), unit="record")]) as made:
        for step in made.missing(8, quiet=True):
            made.write(step["records"], reward=step["tokens"].sum(dim=1).double())
        made.finish()
    with open_field_set(folder / "store", "t", {"ids": ("i4", (2,))}) as made:
        for step in made.missing(8, quiet=True):
            made.write(step["records"], ids=of_ids(step["tokens"].numpy()))
        made.finish()
    return folder / "store"


def test_records_for_grain_have_a_value_of_each_record_and_names_of_ones_own(stored_rows):
    with StoreRecords(stored_rows, fields={"reward": "r/reward", "said": "t/ids"}) as records:
        for record in records[::5]:
            assert record["reward"] == record["input_ids"].sum()
            np.testing.assert_array_equal(record["said"], of_ids(record["input_ids"]))
        assert records[len(records) - 1]["reward"].shape == ()


def test_records_for_grain_of_a_stream_are_the_windows_of_the_set(stream):
    with StoreRecords(stream, seq_len=WINDOW, fields=["rewards/reward"]) as records:
        for record in records[:]:
            assert record["rewards/reward"] == record["input_ids"].sum()
    with pytest.raises(ArgumentError, match=f"each window of {WINDOW} tokens every {WINDOW}"):
        StoreRecords(stream, seq_len=8, fields=["rewards/reward"])
    with pytest.raises(ArgumentError, match="a value for each document, and a record has none"):
        StoreRecords(stream, seq_len=WINDOW, fields=["quality/score"])


def test_a_document_by_its_number_has_the_values_of_its_tokens(stream):
    with open_corpus(stream) as corpus:
        document = corpus.documents[7]
        np.testing.assert_array_equal(document.field("said/ids"), of_ids(document.ids.astype(np.int64)))
        with pytest.raises(ArgumentError, match="a value for each document, and none for a token"):
            document.field("quality/score")


def test_values_of_documents_are_refused_once_there_are_more_of_them(tmp_path):
    (tmp_path / "folder").mkdir()
    for number in range(2):
        rows = [json.dumps({"input_ids": [1 + number, 2, 3]})] * 20
        (tmp_path / f"{number}.jsonl").write_text("\n".join(rows))
        convert(tmp_path / f"{number}.jsonl", "megatron", tmp_path / "folder" / f"{number}.bin", vocab_size=100)
        if number == 0:
            with open_field_set(tmp_path / "folder", "q", [Field("score", np.dtype("i8"), unit="document")]) as made:
                made.write(np.arange(20), score=np.arange(20))
                made.finish()
    with pytest.raises(IncompleteError, match=r"has values for 20 documents, and .* has more now"):
        DocumentLoader(tmp_path / "folder", collate="pad", batch_size=4, fields=["q/score"])


def test_files_without_a_header_get_a_set_by_their_path(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    how = ReadAs(source_dtype="uint16")
    with open_field_set(tmp_path / "train.bin", "t", {"v": "i8"}, seq_len=16, read_as=how) as made:
        for step in made.missing(4, quiet=True):
            made.write(step["records"], v=step["tokens"] * 3)
        made.finish()
    with StoreRecords(tmp_path / "train.bin", seq_len=16, fields=["t/v"], read_as=how) as records:
        assert len(records) == 62
        for record in records[:]:
            np.testing.assert_array_equal(record["t/v"], record["input_ids"] * 3)
    match = "is open: pass read_as to open_corpus"
    with open_corpus(tmp_path / "train.bin", read_as=how) as corpus, pytest.raises(ArgumentError, match=match):
        open_field_set(corpus, "t", None, read_as=how)
