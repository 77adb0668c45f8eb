"""One flipped bit beside the tokens is an error of ours, or changes nothing that a loader gives."""

import pytest
from damage import fields_of, flip_bits, steps_of, tables_of, write_batches, write_streams


@pytest.mark.parametrize("write", [write_batches, write_streams])
@pytest.mark.parametrize("verify", ["auto", "batch", "none"])
def test_a_flipped_bit_of_a_table(write, verify, tmp_path, thinned):
    store, shape = write(tmp_path)
    tables = tables_of(store)
    assert len({path for path, *_ in tables}) >= 3
    found = flip_bits(tables, lambda: steps_of(store, **shape, verify=verify), thinned(range(300), 20))
    assert found["refused"] > 0
    assert verify == "none" or found["silent"] == 0, found


@pytest.mark.parametrize(
    ("write", "verify"), [(write_batches, "auto"), (write_batches, "batch"), (write_streams, "batch")]
)
def test_a_flipped_bit_of_a_field(write, verify, tmp_path, thinned):
    store, shape = write(tmp_path)
    found = flip_bits(fields_of(store), lambda: steps_of(store, **shape, verify=verify), thinned(range(150), 10))
    assert found["refused"] > 0
    assert found["silent"] == 0, found


@pytest.mark.parametrize("write", [write_batches, write_streams])
@pytest.mark.parametrize("verify", ["auto", "batch"])
def test_a_flipped_bit_of_a_cache_is_never_seen(write, verify, tmp_path, thinned):
    store, shape = write(tmp_path)
    shape |= {"cache": tmp_path / "cache", "verify": verify}
    steps_of(store, **shape)
    files = [path for path in sorted((tmp_path / "cache").rglob("*")) if path.is_file() and path.stat().st_size]
    files = [(path, 0, path.stat().st_size) for path in files]
    assert flip_bits(files, lambda: steps_of(store, **shape), thinned(range(150), 10)).keys() == {"same"}
