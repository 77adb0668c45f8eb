"""The dtypes of tokens behind a URL: the steps are those of the same ids of uint32 on this machine."""

import numpy as np
import pytest
import torch
from contract import require_equal, steps_of
from dtype_files import CASES, IDS, SHAPE, STREAMS, written
from reading import ordered

from zb_hdf5 import open_corpus
from zb_hdf5.loaders.order import SHUFFLES
from zb_hdf5.spec import TOKEN_DTYPES

#: Kinds of files that are read on their own machine only.
LOCAL = ("npy", "records", "megatron", "datatrove", "llm.c", "nanogpt", "olmo")
WAYS = {
    "plain": {},
    "targets": {"targets": True, "last": "short"},
    "int32": {"dtype": torch.int32, "prefetch": 0},
}


@pytest.mark.parametrize(("kind", "dtype"), [case for case in CASES if case[0] not in LOCAL])
@pytest.mark.thin
def test_the_steps_are_those_of_uint32_on_this_machine(kind, dtype, served, tmp_path):
    url = f"{served.url}/{written(served.folder, kind, dtype).name}"
    with open_corpus(url) as corpus:
        assert corpus.dtype == TOKEN_DTYPES[dtype].dtype
    plain = written(tmp_path, "npy" if kind in STREAMS else "lone", "uint32")
    for how in WAYS.values():
        for shuffle in SHUFFLES:
            options = {**SHAPE, "shuffle": ordered(shuffle, 3), "seed": 5, **how}
            require_equal(steps_of(url, **options), steps_of(plain, **options))
    found = torch.cat([step.reshape(-1) for step in steps_of(url, **SHAPE, shuffle="sequential", last="short")])
    np.testing.assert_array_equal(found.numpy(), IDS)
