"""A teacher whose probabilities are a table: the KL of a student that is the same table is 0, or values are misplaced.

The probabilities of the next token depend on the token and on the one before it in the same document.
"""

import json

import numpy as np
import pytest
import torch

from zb_hdf5 import Loader, convert, open_corpus, open_field_set

VOCAB = 19
SEQ_LEN = 32
#: log P(next token | the token before, the token); the last row is that of a token that begins a document.
TABLE = torch.log_softmax(torch.randn(VOCAB + 1, VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 2, dim=-1)
SETS = {"teacher": {"logprobs": ("f4", (VOCAB,))}, "scores": {"own": "f4"}}


def says(tokens, cu_seqlens=None, *, sees_before=True):
    """Return log P(next token) at each token of a step, shape (rows, tokens, VOCAB)."""
    flat = tokens.long().reshape(-1)
    before = flat.roll(1)
    starts = torch.arange(0, len(flat), tokens.shape[1]) if cu_seqlens is None else cu_seqlens[:-1].long()
    before[starts[starts < len(flat)]] = VOCAB
    if not sees_before:
        before = torch.full_like(flat, VOCAB)
    return TABLE[before, flat].reshape(*tokens.shape, VOCAB)


def of_tokens(tokens, said, starts):
    """Return log P of each token itself, after those before it; 0 of the first token of a document."""
    own = torch.zeros(tokens.numel())
    own[1:] = said.reshape(-1, VOCAB)[:-1].gather(1, tokens.long().reshape(-1, 1)[1:])[:, 0]
    own[starts] = 0
    return own.reshape(tokens.shape)


def teach(path, *, sees_before, documents=False, **windows):
    """Write the probabilities of all tokens, and of each token itself, as two jobs do."""
    for name, fields in SETS.items():
        about = "next" if name == "teacher" else "token"
        with open_field_set(path, name, fields, about=about, part_bytes=30_000, **windows) as found:
            options = {"documents": ("cu_seqlens",)} if documents else {}
            for step in found.missing(batch_size=5, quiet=True, **options):
                tokens = step["tokens"]
                said = says(tokens, step.get("cu_seqlens"), sees_before=sees_before)
                if name == "teacher":
                    found.write(step["records"], logprobs=said)
                    continue
                starts = (
                    step["cu_seqlens"][:-1].long() if documents else torch.arange(0, tokens.numel(), tokens.shape[1])
                )
                found.write(step["records"], own=of_tokens(tokens, said, starts[starts < tokens.numel()]))
            found.finish()


def require_no_kl(loader, *, sees_before, context=0):
    """See that the KL is 0 wherever there is a target, and that it is not if values come one place too late.

    The first `context` tokens of each row are left out, of which the teacher has seen more than the student.
    """
    places = 0
    misplaced = []
    for step in loader:
        there = step["targets"] != -100
        there[:, :context] = False
        student = says(step["tokens"], step.get("cu_seqlens"), sees_before=sees_before)
        taught = step["teacher/logprobs"]
        kl = (taught.exp() * (taught - student)).sum(dim=-1)
        assert kl[there].abs().max() == 0
        of_targets = student.gather(2, step["targets"].clamp(min=0).long()[..., None])[..., 0]
        assert torch.equal(step["scores/own"][there], of_targets[there])
        misplaced.append(float((taught.roll(1, 1).exp() * (taught.roll(1, 1) - student)).sum(dim=-1)[there].mean()))
        places += int(there.sum())
    assert np.mean(misplaced) > 1
    return places


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(5).integers(0, VOCAB, 80 * SEQ_LEN).astype(np.uint16)


@pytest.fixture(scope="module")
def taught(tmp_path_factory, tokens):
    """A store, a stream of the same tokens, and a store of packed documents, each with what the teacher says."""
    folder = tmp_path_factory.mktemp("taught")
    np.save(folder / "rows.npy", tokens.reshape(-1, SEQ_LEN))
    np.save(folder / "stream.npy", tokens)
    convert(folder / "rows.npy", "hdf5", folder / "store", batch_size=4, shards=2)
    teach(folder / "store", sees_before=False)
    teach(folder / "stream.npy", sees_before=False, seq_len=64, stride=16)
    texts = np.random.default_rng(6).integers(2, 2 * SEQ_LEN, 60)
    made = [{"text": "".join(map(chr, np.random.default_rng(k).integers(0, 18, n)))} for k, n in enumerate(texts)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, made)))
    convert(
        folder / "texts.jsonl",
        "hdf5",
        folder / "packed",
        tokenizer="byte",
        seq_len=SEQ_LEN,
        batch_size=4,
        remainder="pad",
        no_boundary=True,
        pad_id=0,
    )
    teach(folder / "packed", sees_before=True, documents=True)
    return folder


@pytest.mark.parametrize("seq_len", [SEQ_LEN, SEQ_LEN // 2, SEQ_LEN // 8])
@pytest.mark.parametrize("shuffle", ["global", "records"])
def test_stored_records_and_divisors_of_them(taught, tokens, seq_len, shuffle):
    names = ["teacher/logprobs", "scores/own"]
    with Loader(taught / "store", fields=names, targets=True, seq_len=seq_len, shuffle=shuffle) as loader:
        places = require_no_kl(loader, sees_before=False)
    assert places == len(tokens) - len(tokens) // seq_len  # the last token of a record has no target


@pytest.mark.parametrize(("seq_len", "stride"), [(64, None), (40, 24), (7, 7)])
def test_windows_of_a_stream(taught, tokens, seq_len, stride):
    names = ["teacher/logprobs", "scores/own"]
    with (
        open_corpus(taught / "stream.npy") as corpus,
        Loader(corpus.batches(3, seq_len, stride), fields=names, targets=True, last="masked") as loader,
    ):
        places = require_no_kl(loader, sees_before=False)
    windows = (len(tokens) - 1 - seq_len) // (stride or seq_len) + 1
    assert places == windows * seq_len


@pytest.mark.parametrize("seq_len", [SEQ_LEN, SEQ_LEN // 2])
def test_packed_documents(taught, seq_len):
    names = ["teacher/logprobs", "scores/own"]
    with Loader(
        taught / "packed",
        fields=names,
        targets=True,
        documents=("cu_seqlens",),
        seq_len=seq_len,
        shuffle="records",
        last="masked",
    ) as loader:
        assert require_no_kl(loader, sees_before=True, context=int(seq_len < SEQ_LEN)) > 900
