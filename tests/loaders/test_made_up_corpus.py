"""Tokens that are computed from their positions: the same on every rank, in every order, and after a resume."""

import math
import pickle

import numpy as np
import pytest
import torch
from contract import same, steps_of

from zb_hdf5 import ArgumentError, BackendError, Loader, StateError, made_up_corpus, open_reader

SHAPE = {"num_tokens": 9 * 4 * 16 + 35, "vocab_size": 1_000, "batch_size": 4, "seq_len": 16}


def test_a_token_follows_from_its_position_and_the_seed():
    corpus = made_up_corpus(**SHAPE)
    tokens = corpus.tokens[0 : corpus.tokens.num_tokens]
    assert (corpus.num_batches, corpus.rest, corpus.num_records) == (9, 2, 38)
    same(tokens[:8], [652, 166, 509, 975, 370, 48, 957, 70])  # they never change
    same(np.concatenate([*corpus]).reshape(-1), tokens[: 9 * 64])
    same(corpus.tokens[7:40], tokens[7:40])
    same(made_up_corpus(**SHAPE).tokens[0:99], tokens[:99])
    assert (made_up_corpus(**SHAPE, seed=1).tokens[0:99] != tokens[:99]).any()


def test_ids_are_even_over_the_vocabulary_also_far_from_the_start():
    corpus = made_up_corpus(10**15, 10, 1, 50_000)
    for number in (0, corpus.num_batches - 1):
        counts = np.bincount(corpus[number][0], minlength=10)
        assert len(counts) == 10
        assert abs(counts - 5_000).max() < 5 * math.sqrt(5_000)


@pytest.mark.parametrize("shuffle", ["global", "records", ("block", 4), "sequential"])
def test_ranks_read_together_what_one_reads_in_any_order_and_after_a_resume(shuffle):
    corpus = made_up_corpus(**SHAPE)
    options = {"shuffle": shuffle, "seed": 3, "last": "short"}
    alone = torch.cat(steps_of(corpus, **options))
    corpus = made_up_corpus(**SHAPE)
    expected = corpus.tokens[0 : 38 * 16].reshape(38, 16)
    assert sorted(alone.tolist()) == sorted(expected.tolist())
    with Loader(made_up_corpus(**SHAPE), rank=0, world_size=1, **options) as loader:
        first = [next(loader) for _ in range(2)]
        state = loader.state_dict()
    rest = []
    for rank in range(3):
        with Loader(made_up_corpus(**SHAPE), batch_size=5, rank=rank, world_size=3, **options) as loader:
            loader.load_state_dict(state)
            rest.append(list(loader))
    found = torch.cat([*first, *(each for step in zip(*rest, strict=True) for each in step)])
    same(found, alone)


def test_targets_of_overlapping_records_are_the_next_tokens():
    corpus = made_up_corpus(**SHAPE, overlap=1)
    tokens = corpus.tokens[0:17].astype(np.int64)
    x, y = steps_of(corpus, targets=True, shuffle="sequential")[0]
    same(x[0], tokens[:16])
    same(y[0], tokens[1:])


def test_it_is_like_a_store_of_which_no_token_is_read(store):
    with open_reader(store) as reader:
        expected = (reader.tokens.num_tokens, reader.batch_size, reader.seq_len, reader.dtype)
        copies = made_up_corpus(like=store), made_up_corpus(like=reader)
    for copy in copies:
        assert (copy.tokens.num_tokens, copy.batch_size, copy.seq_len, copy.dtype) == expected
    assert copies[0].fingerprint == copies[1].fingerprint
    other = made_up_corpus(like=store, batch_size=1, vocab_size=2**20)
    assert (other.batch_size, other.seq_len, other.dtype) == (1, expected[2], np.uint32)


def test_a_pickled_one_has_the_same_tokens():
    corpus = made_up_corpus(**SHAPE)
    same(pickle.loads(pickle.dumps(corpus))[8], corpus[8])


def test_values_that_are_missing_or_impossible_are_named():
    with pytest.raises(ArgumentError, match=r"made_up_corpus needs vocab_size, seq_len; pass them, or like="):
        made_up_corpus(10_000, batch_size=2)
    with pytest.raises(ArgumentError, match="vocab_size must be at least 1, found 0"):
        made_up_corpus(**{**SHAPE, "vocab_size": 0})
    with pytest.raises(ArgumentError, match=r"vocab_size must be at most 2\*\*32"):
        made_up_corpus(**{**SHAPE, "vocab_size": 2**33})
    with pytest.raises(BackendError, match="made-up tokens have neither fields nor documents"):
        Loader(made_up_corpus(**SHAPE), documents=True)
    with pytest.raises(ArgumentError, match="made-up tokens have neither fields nor documents"):
        Loader(made_up_corpus(**SHAPE), fields=["loss_mask"])
    with Loader(made_up_corpus(**SHAPE), rank=0, world_size=1) as loader:
        state = loader.state_dict()
    with Loader(made_up_corpus(**SHAPE, seed=1), rank=0, world_size=1) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)
