"""Each line of the page of errors is typed after its error: the error is met first, and then its lines cure it."""

import contextlib
import json
import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from byte_files import write_megatron
from click.testing import CliRunner
from interrupted import stopped_before_the_index
from pages import BLOCK, TEXT, names_a_file, ran, untagged_in, variables_in, words_of
from processes import killed
from torch.utils.data import DataLoader

from zb_hdf5 import FollowingLoader, HDF5ShardWriter, Loader, convert
from zb_hdf5.commands.zb import zb


def arrays():
    Path("tokens").mkdir()
    np.save("tokens/0.npy", np.arange(40_000, dtype=np.uint16).reshape(-1, 500))


def stored():
    arrays()
    convert("tokens", "hdf5", "train-h5", batch_size=8)


def linked():
    stored()
    os.replace("train-h5", "elsewhere")
    os.symlink("elsewhere", "train-h5")
    return "zb convert npy-to-hdf5 tokens/ train-h5 --force"


def there_already():
    stored()
    return "zb convert npy-to-hdf5 tokens/ train-h5"


def interrupted():
    """Stop a conversion when its shard is there, and before it is published."""
    arrays()
    with pytest.MonkeyPatch.context() as patch, stopped_before_the_index(patch):
        convert("tokens/", "hdf5", "train-h5")
    return "zb convert npy-to-hdf5 tokens/ train-h5"


def small_vocabulary():
    arrays()
    return "zb convert npy-to-hdf5 tokens/ train-h5 --vocab-size 1000"


def too_few_held_out():
    arrays()
    return "zb convert npy-to-hdf5 tokens/ train-h5 --val-fraction 0.001 --batch-size 8"


def named_twice():
    arrays()
    return "zb convert npy-to-hdf5 tokens/0.npy tokens/ train-h5"


def texts():
    rows = [{"text": "a b"}] * 9
    Path("corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "zb convert corpus.jsonl corpus --to stream"


def columns():
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    parquet.write_table(table({"body": ["a b"] * 9, "author": ["Ada"] * 9}), "corpus.parquet")
    return "zb convert corpus.parquet corpus --to stream --tokenizer byte"


def other_metadata():
    return f"{columns()} --text-column body --metadata-columns writer"


def keys():
    rows = [{"body": "a b"}] * 9
    Path("corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "zb convert corpus.jsonl corpus --to stream --tokenizer byte"


def equal_ids():
    rows = [{"text": "a b", "author": "Ada"}] * 9
    Path("corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "zb convert corpus.jsonl corpus --to stream --tokenizer byte --id-column author"


def labels_in_rows():
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    rows = [[1, 2, 3]] * 9
    parquet.write_table(table({"input_ids": rows, "labels": [["a"]] * 9}), "rows.parquet")
    return "zb convert rows.parquet rows --to stream"


def long_line():
    """Write a line of 257 MiB, which takes no room: it is a hole."""
    with open("corpus.jsonl", "wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        file.truncate(257 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b'"}\n')
    return "zb convert corpus.jsonl corpus --to stream --tokenizer byte"


def large_tokenizer():
    """Write a file of JSON of 257 MiB, which is read whole."""
    stored()
    Path("train-h5/shards.json").write_text(f"{Path('train-h5/shards.json').read_text()}{' ' * (257 << 20)}")
    return "zb info train-h5"


def no_texts():
    rows = [{"text": "a b"}, *[{"text": ""}] * 4]
    Path("corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "zb convert corpus.jsonl corpus --to stream --tokenizer byte"


def no_documents():
    ids = np.arange(1000, dtype=np.uint16)
    ids[99::100] = 50_256
    np.save("tokens.npy", ids)
    return "zb convert tokens.npy corpus.bin --to megatron"


def lost_index():
    stored()
    Path("train-h5/shards.json").unlink()
    return "zb info train-h5"


def no_header():
    Path("train.bin").write_bytes(np.arange(5000, dtype="<u2").tobytes())
    return "zb info train.bin"


def part_of_an_id():
    Path("train.bin").write_bytes(np.arange(5001, dtype="<u2").tobytes())
    return "zb info train.bin --source-dtype uint32"


def saved_to_disk():
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 9}).save_to_disk("saved_to_disk")
    return "zb info saved_to_disk"


def passed_to_a_data_loader():
    stored()

    def use():
        with Loader("train-h5", rank=0, world_size=1) as loader:
            next(iter(DataLoader(loader)))

    return use


def state_of_another_store():
    """Save the state of a store, and take it for another one of the same tokens in another order."""
    stored()
    convert("tokens", "hdf5", "other-h5", batch_size=8, seed=1)
    with Loader("train-h5", rank=0, world_size=1) as loader:
        Path("loader.json").write_text(json.dumps(loader.state_dict()))

    def use():
        with Loader("other-h5", rank=0, world_size=1) as loader:
            loader.load_state_dict(json.loads(Path("loader.json").read_text()))

    return use


def no_digests():
    write_megatron(Path("corpus.bin"), np.arange(8000, dtype="<u2"), [1000] * 8, 8)

    def use():
        Loader("corpus.idx", batch_size=2, seq_len=100, verify="store")

    return use


def damaged():
    stored()
    [shard] = Path("train-h5").glob("*.h5")
    content = bytearray(shard.read_bytes())
    with h5py.File(shard) as h5:
        place = h5["batches"].id.get_chunk_info(0).byte_offset
    content[place] ^= 1
    shard.write_bytes(content)

    def use():
        with Loader("train-h5", rank=0, world_size=1) as loader:
            list(loader)

    return use


def killed_writer():
    killed("""
writer = open_writer("train.h5", batch_size=2, seq_len=8, dtype="uint16")
writer.write(np.ones((3, 2, 8), np.uint16))""")
    return "zb verify train.h5.partial"


def lost_shard():
    arrays()
    convert("tokens", "hdf5", "train-h5", batch_size=8, shards=2)
    max(Path("train-h5").glob("*.h5")).unlink()
    return "zb info train-h5"


def killed_live_writer():
    killed("""
writer = open_writer("live", batch_size=2, seq_len=8, dtype="uint16", live=True, shard_batches=4)
writer.write(np.ones((6, 2, 8), np.uint16))""")

    def use():
        with FollowingLoader("live", timeout_s=0.1, rank=0, world_size=1) as loader:
            list(loader)

    return use


def other_index():
    """Take the index of a store of the same tokens in other documents."""
    for name, length in (("train", 10), ("other", 20)):
        with HDF5ShardWriter(f"{name}.h5", dtype="uint16") as writer:
            writer.write_documents(np.arange(4000, dtype=np.uint16), [length] * (4000 // length))
        convert(f"{name}.h5", "hdf5", f"{name}-h5", seq_len=50, batch_size=8, packing="concat")
    os.replace("other-h5/shards.json", "train-h5/shards.json")
    return "zb verify train-h5"


#: Beginning of a heading -> a function that makes what leads to its error, and returns the line or the function of it.
MET = {
    "…: expected a file or folder to write, found a link": linked,
    "…: exists already": there_already,
    "…: an interrupted conversion with": interrupted,
    "…: token id … at … is outside": small_vocabulary,
    "…: val_fraction … of … records": too_few_held_out,
    "…: is named … times": named_twice,
    "… need tokenizer": texts,
    "…: no column … for the text": columns,
    "…: no column … for its documents": other_metadata,
    "no documents in … (no key": keys,
    "…: the id … was there before": equal_ids,
    "…: expected a multiple of … bytes": part_of_an_id,
    "state has … …, this loader …": state_of_another_store,
    "…: column …: expected lists of one number for each id": labels_in_rows,
    "…: expected a line to have at most": long_line,
    "…: expected a file that is read whole to have at most": large_tokenizer,
    "…: expected at most … of the lines, rows or files to be dropped": no_texts,
    "…: tells no documents apart…: pass boundary_token_id": no_documents,
    "…: no …: its index was lost": lost_index,
    "…: its writer has not finished": killed_writer,
    "…: names …, which is not there": lost_shard,
    "…: no new batch for … s": killed_live_writer,
    "…: belongs to another store, or was made again": other_index,
    "…: expected a token file of …, found another file": no_header,
    "…: has …, which are not read in place": saved_to_disk,
    "…: a Loader is iterated over and has no items": passed_to_a_data_loader,
    "…: cannot be verified: …": no_digests,
    "…: … …: expected crc32 …, found …": damaged,
}
#: Beginning of a heading whose error needs what this machine has not -> what that is; its line is typed all the same.
NOT_MET = {
    "…: needs … inodes, only … are free": "a file system without inodes",
    "…: No space left on device": "a disk that others fill meanwhile",
}
#: Beginning of a heading whose line is not typed -> why.
NOT_TYPED = {
    "…: this HDF5 installation lacks a filter": "loads packages",
    "reading URLs needs obstore": "loads packages",
    "…: access denied": "needs the program and an account of AWS; tests/remote/ has servers with passwords",
    "…: its server has no TLS": "needs a server that speaks S3: tests/remote/test_tutorial.py types it there",
}
#: Beginning of a heading -> the exit code with which its first line tells of the damage.
CODES = {"…: … …: expected crc32 …, found …": 3, "…: names …, which is not there": 4}


def sections():
    """Return heading -> the lines below it, also those in its sentences."""
    _, *found = re.split(r"^\*\*`", TEXT["errors.md"], flags=re.MULTILINE)
    lines = {text.partition("`**")[0]: lines_in(text) for text in found}
    return {heading: typed for heading, typed in lines.items() if typed}


def lines_in(text):
    named = re.findall(r"`(zb [^`\n]+)`", BLOCK.sub("", text))
    return [*filter(names_a_file, named), *"\n".join(untagged_in(text)).splitlines()]


def beginning_of(heading):
    """Return the beginning of a heading by which a table has it."""
    [found] = [each for each in (*MET, *NOT_MET, *NOT_TYPED) if heading.startswith(each)]
    return found


def test_each_line_of_the_page_is_typed_or_has_a_reason():
    assert sorted(map(beginning_of, sections())) == sorted([*MET, *NOT_MET, *NOT_TYPED])
    assert (len(MET), len(NOT_MET), len(NOT_TYPED)) == (28, 2, 4)


def error_of(met):
    """Return the message of a line that fails, or of a function, with the names that options have in Python."""
    if callable(met):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, the page tells
            met()
        return str(caught.value)
    done = CliRunner().invoke(zb, words_of(met)[1:])
    assert done.exit_code, done.output
    return re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), done.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "heading",
    [each for each in sections() if beginning_of(each) not in NOT_TYPED],
    ids=lambda heading: "_".join(re.findall(r"\w+", heading)[:6]),
)
def test_the_lines_below_an_error_cure_it(heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begins = beginning_of(heading)
    if begins in MET:
        met = MET[begins]()
        message = error_of(met)
        assert re.search(".*".join(map(re.escape, heading.split("…"))), message, re.DOTALL), message
    else:
        arrays()
    for number, line in enumerate(sections()[heading]):
        if line.startswith("zb "):
            ran([line], CODES.get(begins, 0) if number == 0 else 0)
        elif line.startswith("export "):
            for name, value in variables_in(line).items():
                monkeypatch.setenv(name, value)
            ran([met])
        else:
            with contextlib.closing(Loader("train-h5", rank=0, world_size=1)) as loader:
                assert len(list(eval(line, {"loader": loader, "DataLoader": DataLoader}))) == len(loader)
