"""Fixtures: Slurm clusters on this host, and tokens to convert on them."""

import numpy as np
import pytest
from on_slurm import ROOT, cluster


@pytest.fixture(scope="session")
def shared_cluster():
    with cluster() as slurm:
        yield slurm


@pytest.fixture
def slurm(shared_cluster, work):
    """A cluster for all tests, whose jobs run in a folder of this test's own."""
    shared_cluster.work = work
    return shared_cluster


@pytest.fixture
def own_cluster(work):
    """A cluster that the test may break."""
    with cluster() as slurm:
        slurm.work = work
        yield slurm


@pytest.fixture
def work(tmp_path):
    """A folder with the examples, and 4 MiB of tokens: 128 batches of the default shape."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    tokens = np.random.default_rng(4).integers(0, 50_000, (4096, 512), dtype=np.uint16)
    np.save(tmp_path / "tokens/tokens.npy", tokens)
    return tmp_path
