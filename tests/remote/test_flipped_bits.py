"""One flipped bit in an object is an error of ours, or changes nothing that a loader gives."""

import pytest
from damage import fields_of, flip_bits, steps_of, tables_of, write_batches, write_streams


@pytest.mark.parametrize("write", [write_batches, write_streams])
@pytest.mark.parametrize("verify", ["auto", "batch"])
def test_a_flipped_bit_of_an_object(write, verify, served, thinned):
    folder, url = served
    store, shape = write(folder)
    # windows of streams compare their fields with "batch" only
    ranges = tables_of(store) + (fields_of(store) if verify == "batch" or write is write_batches else [])
    found = flip_bits(ranges, lambda: steps_of(f"{url}/store", **shape, verify=verify), thinned(range(150), 10))
    assert found["refused"] > 0
    assert found["silent"] == 0, found
