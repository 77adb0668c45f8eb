"""One contract for every writer: of a file of each format, and of a live store."""

import hashlib

import numpy as np
import pytest
from contents import batches_of
from contract import check_writer, check_writer_of_fields, random_tokens

from zb_hdf5 import ShardIndex, open_reader, open_writer
from zb_hdf5.field import parse_fields
from zb_hdf5.spec import StoreMeta, combine_sha256
from zb_hdf5.store.format_list import FORMATS, batch_formats, load_format

EXPECTED = 9


def read_npy(info):
    tokens = np.load(info.path)
    return tokens.reshape(EXPECTED, -1, tokens.shape[1]), hashlib.sha256(tokens).hexdigest()


def read_file(info):
    tokens = batches_of(info.path)
    return tokens, hashlib.sha256(tokens).hexdigest()


def read_store(info):
    index = ShardIndex.load(info.path)
    with open_reader(info.path) as reader:
        assert reader.complete
        tokens = np.stack(list(reader))
    stops = np.cumsum([shard.num_batches for shard in index.shards])
    digests = [hashlib.sha256(part).hexdigest() for part in np.split(tokens, stops[:-1])]
    assert info.sha256 == index.sha256
    return tokens, combine_sha256(digests)


def begin(name, path, shape, dtype, fields=None, expected_batches=0):
    """Begin a live store, or a file of a format."""
    if name.startswith("live"):
        how = {"batch_size": shape[0], "seq_len": shape[1], "dtype": dtype, "fields": fields}
        return open_writer(path, **how, live=True, shard_batches=int(name.removeprefix("live-")))
    meta = StoreMeta(*shape, np.dtype(dtype), fields=parse_fields(fields or {}))
    code = load_format(FORMATS[name])
    return code.write(path.with_suffix(code.row.suffix), meta, expected_batches=expected_batches)


@pytest.mark.parametrize(("shape", "dtype"), [((4, 1024), "uint32"), ((3, 1000), "uint16")], ids=["packed", "padded"])
@pytest.mark.parametrize("name", [*batch_formats(), *(f"live-{count}" for count in (1, 4, 9, 100))])
@pytest.mark.thin
def test_every_writer_keeps_the_contract(name, shape, dtype, tmp_path):
    expected = random_tokens(EXPECTED, *shape, dtype)

    def make(number):
        return begin(name, tmp_path / f"{number}", shape, dtype, expected_batches=EXPECTED)

    read_back = {"npy": read_npy}.get(name, read_store if name.startswith("live") else read_file)
    check_writer(make, read_back, expected)


@pytest.mark.parametrize("name", ["hdf5", "live-1", "live-4", "live-100"])
@pytest.mark.thin
def test_every_writer_keeps_the_contract_of_fields(name, tmp_path):
    expected = random_tokens(EXPECTED, 4, 1024, "uint16")
    values = {"mask": (expected % 2).astype("u1"), "vector": np.stack([expected, expected], -1).astype("<f4")}
    fields = {"mask": "u1", "vector": ("<f4", (2,))}

    def make(number):
        return begin(name, tmp_path / f"{number}", (4, 1024), "uint16", fields)

    check_writer_of_fields(make, expected, values)
