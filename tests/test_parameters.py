"""The arguments of the loaders: few, in the order of their use, and each said once."""

import inspect

import numpy as np
import pytest
from contract import is_refused

import zb_hdf5
from zb_hdf5 import ArgumentError, DocumentLoader, HDF5ShardWriter, Loader

#: The most parameters of a front.
MOST = {Loader: 26, DocumentLoader: 24}
HOW = {"rank": 0, "world_size": 1}


@pytest.mark.parametrize("front", MOST)
def test_a_loader_has_few_parameters(front):
    names = list(inspect.signature(front).parameters)
    assert names[0] == "source"
    assert len(names) <= MOST[front]


def test_the_ways_of_opening_come_last():
    names = list(inspect.signature(Loader).parameters)
    assert names[:5] == ["source", "batch_size", "seq_len", "shuffle", "seed"]
    assert names[-6:] == ["split", "read_as", "cache", "verify", "access", "backend"]
    assert list(inspect.signature(DocumentLoader).parameters)[-4:] == ["split", "read_as", "cache", "verify"]


def test_the_options_of_a_configuration_have_a_public_type(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(96))
    config: zb_hdf5.LoaderOptions = {"batch_size": 2, "seq_len": 8, "shuffle": ["block", 2]}  # a list, as JSON has it
    with Loader(tmp_path / "a.npy", **config, **HOW) as loader:
        assert (loader.shuffle, loader.block_size) == ("block", 2)


@pytest.mark.parametrize(("given", "words"), [
    ({"shuffle": ("records", 4)}, '"block" alone takes a number'),
    ({"shuffle": ("block", 4, 4)}, "shuffle must be one value, or a pair"),
    ({"shuffle": ("block", 0)}, "block_size must be at least 1"),
    ({"shuffle": ("block", "4")}, "block_size must be a whole number"),
    ({"documents": [("position_ids", 4)]}, "cu_seqlens alone takes a length"),
    ({"documents": [("cu_seqlens", 0)]}, "the length of cu_seqlens must be at least 1"),
])  # fmt: skip
def test_a_pair_without_sense_is_refused(given, words, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(96))
    is_refused(ArgumentError, lambda: Loader(tmp_path / "a.npy", batch_size=2, seq_len=8, **given, **HOW), match=words)


@pytest.mark.parametrize(("given", "words"), [
    ({"shuffle": ("global", 4)}, '"lengths" alone takes a number'),
    ({"shuffle": ("lengths", 0)}, "bucket_batches must be at least 1"),
    ({"collate": ("pad", 0)}, "the multiple of collate must be at least 1"),
    ({"collate": ("pad", 8), "max_tokens": 12}, "max_tokens must be a multiple of 8"),
    ({"max_tokens": (8, "cut")}, "the second value of max_tokens must be one of refuse, truncate, drop"),
])  # fmt: skip
def test_a_pair_of_the_loader_of_documents_without_sense_is_refused(given, words, tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5") as writer:
        writer.write_document([1, 2, 3])
    how = {"collate": "pad", "batch_size": 1, **HOW, **given}
    is_refused(ArgumentError, lambda: DocumentLoader(tmp_path / "s.h5", **how), match=words)
