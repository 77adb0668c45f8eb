"""`zb_hdf5.convert`: the conversion of the command, from Python."""

import inspect
import json
import re

import numpy as np
import pytest
from commandline import one_error, run_zb, succeed
from contents import batches_of

from zb_hdf5 import ArgumentError, BackendError, ConvertError, ExistsError, convert
from zb_hdf5.console import flag_of
from zb_hdf5.converters.cli import convert_any
from zb_hdf5.converters.cli import convert_commands as command
from zb_hdf5.converters.conversion import OPTIONS, WHOLE, Conversion
from zb_hdf5.converters.engines import CountedWork, work_noted_in
from zb_hdf5.converters.merge import merge_parts
from zb_hdf5.converters.resolution import resolved

ROWS = np.random.default_rng(4).integers(0, 50_000, (40, 16), dtype=np.uint16)


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", ROWS.reshape(-1))
    return tmp_path / "tokens.npy"


def test_the_files_are_those_of_the_command(tokens, tmp_path):
    report = convert(tokens, "hdf5", tmp_path / "here", batch_size=4, seq_len=16, seed=3, shards=2)
    options = ["--batch-size", 4, "--seq-len", 16, "--seed", 3, "--shards", 2, "--quiet"]
    succeed(command, "npy-to-hdf5", tokens, tmp_path / "there", *options)
    assert report.num_batches == 10
    shards = [json.loads((tmp_path / name / "shards.json").read_text())["shards"] for name in ("here", "there")]
    assert shards[0] == shards[1]


def test_impossible_arguments_are_refused(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "x.h5", batch_size=4, seq_len=16)
    with pytest.raises(FileExistsError) as caught:
        convert(tokens, "hdf5", tmp_path / "x.h5", batch_size=4, seq_len=16)
    assert isinstance(caught.value, ExistsError)
    for source, target, options, message in (
        (tokens, "zip", {}, "target"),
        (tmp_path / "x.h5", "batch", {"seed": 1, "pad_id": 3}, "pad_id, seed belong to npy"),
        ([tmp_path / "x.h5"] * 2, "batch", {}, "expected one"),
        ([], "batch", {}, "none"),
        (tokens, "hdf5", {"dataset": "tokens"}, "dataset"),
    ):
        with pytest.raises(ArgumentError, match=message):
            convert(source, target, tmp_path / "y", **options)
    with pytest.raises(BackendError):
        convert(tmp_path / "x.h5", "batch", tmp_path / "y.batch", source_format="batch")


NUMBERS = ["shards", "shard_size", "seq_len", "batch_size", "workers", "memory"]


@pytest.mark.parametrize(("name", "value", "expected"), [
    *((name, value, f"at least 1, found {value}") for name in NUMBERS for value in (0, -1)),
    *(("shard_range", part, f"(i, n) with i from 0 to n - 1, found {part}") for part in ((3, 3), (-1, 3), (0, 0))),
])  # fmt: skip
def test_a_number_or_a_part_that_cannot_be_is_named(tokens, tmp_path, name, value, expected):
    how = {"batch_size": 4, "seq_len": 16, name: value}
    with pytest.raises(ArgumentError, match=f"^{re.escape(f'{name} must be {expected}')}$"):
        convert(tokens, "hdf5", tmp_path / "out", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]


def test_a_folder_with_an_index_is_a_store_and_no_folder_of_arrays(tokens, tmp_path):
    convert(tokens, "hdf5", tmp_path / "out", batch_size=4, seq_len=16, shuffle=False)
    (tmp_path / "out/below").mkdir()
    np.save(tmp_path / "out/below/other.npy", ROWS)
    convert(tmp_path / "out", "batch", tmp_path / "copy", dtype="uint16")
    np.testing.assert_array_equal(np.concatenate(batches_of(tmp_path / "copy")), ROWS)


def test_stores_and_streams_record_their_largest_id_and_copies_stay_equal(tokens, tmp_path):
    shape = {"batch_size": 4, "seq_len": 16, "shards": 2}
    convert(tokens, "hdf5", tmp_path / "store", **shape)
    for target, source in (("batch", "store"), ("hdf5", "batch")):
        convert(tmp_path / source, target, tmp_path / ("back" if source == "batch" else target), dtype="uint16")
    index = json.loads((tmp_path / "store/shards.json").read_text())
    assert (index["source"]["max_token"], index["vocab_size"]) == (ROWS.max(), ROWS.max() + 1)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("store", "back")]
    assert files[0] == files[1]
    for number in range(2):
        convert(tokens, "hdf5", tmp_path / "parts", **shape, shard_range=(number, 2))
    checked = []
    merge_parts(tmp_path / "parts", progress=lambda *counts: checked.append(counts))
    assert checked == [(1, 2), (1, 2)]
    assert (tmp_path / "parts/shards.json").read_bytes() == (tmp_path / "store/shards.json").read_bytes()
    assert convert(tokens, "hdf5", tmp_path / "store", **shape, resume=True).kept.shards == 2
    np.save(tmp_path / "flat.npy", ROWS.reshape(-1))
    convert(tmp_path / "flat.npy", "stream", tmp_path / "stream", boundary_token_id=1)
    convert(tmp_path / "stream", "hdf5", tmp_path / "of-stream", batch_size=4, seq_len=16)
    for name in ("stream", "of-stream"):
        assert json.loads((tmp_path / name / "shards.json").read_text())["source"]["max_token"] == ROWS.max()


def test_progress_reaches_its_end_when_the_last_shard_is_on_the_disk(tmp_path):
    """The flush is work: a shard whose tokens are all written is not done."""
    np.save(tmp_path / "in.npy", np.arange(40 * 32 * 64, dtype="<u2"))
    total, amounts = 40 * 32 * 64, []
    how = {"batch_size": 32, "seq_len": 64, "shards": 2, "workers": 1, "progress": amounts.append}
    convert(tmp_path / "in.npy", "hdf5", tmp_path / "out", **how)
    assert (sum(amounts), min(amounts)) == (total, 0)
    done = np.cumsum(amounts).tolist()
    for written in (total / 3, total * 5 / 6):  # all tokens of one shard, or of both
        assert any(abs(each - written) < 2 for each in done)
    assert not list(tmp_path.glob("out/*.progress"))


def test_a_process_that_waits_for_another_sees_its_progress_by_a_note(tmp_path):
    note, seen = tmp_path / "note", []
    work = CountedWork(900, seen.append, note)
    assert work_noted_in(note) == 0
    while not note.exists():
        work.reach(1 / 3)
    assert work_noted_in(note) == 300
    work.reach(1.0)
    assert sum(seen) == 900
    note.write_text("")  # it is being written
    assert work_noted_in(note) == 0


# --- names and settings ------------------------------------------------------------------------------------------


def test_the_parameters_of_convert_are_the_options_with_their_defaults_and_all_are_documented():
    parameters = inspect.signature(convert).parameters
    named = [name for name in parameters if name != "unknown"]
    assert named == ["source", "target", "destination", "source_format", *OPTIONS, "progress", "engine"]
    assert {parameters[name].default for name in OPTIONS} == {None}
    documented = re.search(r"Parameters\n    -+\n(.*?)\n    Returns\n", convert.__doc__, re.DOTALL)[1]
    assert re.findall(r"^    ([\w*]+)$", documented, re.MULTILINE) == [*named, "**unknown"]


def test_python_and_the_command_have_one_list_of_names():
    flags = {flag for option in convert_any.params for flag in option.opts if flag.startswith("--")}
    known = {flag_of(name) for name in OPTIONS} | {"--from", "--to", "--dry-run", "--list", "--json", "--quiet"}
    assert flags - {"--no-shuffle"} == known
    pairs = {flag for each in command.commands.values() for option in each.params for flag in option.opts}
    assert {flag for flag in pairs if flag.startswith("--")} < flags


@pytest.mark.parametrize(("name", "nearest"), [
    ("num_shards", "did you mean shards"), ("shard_sizes", "shard_size"), ("memory_bytes", "did you mean memory?"),
    ("batchsize", "did you mean batch_size?"), ("overwrite", "the options are tokenizer, text_column"),
])  # fmt: skip
def test_a_name_that_no_option_has_is_refused_with_the_nearest(tokens, tmp_path, name, nearest):
    with pytest.raises(ArgumentError, match=f"a conversion has no option {name}; .*{re.escape(nearest)}"):
        convert(tokens, "hdf5", tmp_path / "out", **{name: 1})
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]


@pytest.mark.parametrize(("options", "library", "typed"), [
    ({"shards": 2, "shard_size": 99}, "pass either shards or shard_size, not both",
     "pass either --shards or --shard-size, not both"),
    ({"memory": 10}, "memory: 10 bytes is too little .* use fewer workers",
     "--memory: 10 bytes is too little .* use fewer --workers"),
    ({"live": True, "workers": 2}, "live is written by one process, .*: leave out workers",
     "--live is written by one process, into a new folder: leave out --workers"),
    ({"shards": 99}, "fill 99 shards; pass a smaller number of shards", "fill 99 shards; pass a smaller --shards"),
])  # fmt: skip
def test_the_library_names_options_and_the_command_their_flags(tokens, tmp_path, options, library, typed):
    shape = {"batch_size": 4, "seq_len": 16}
    with pytest.raises((ArgumentError, ConvertError), match=library):
        convert(tokens, "hdf5", tmp_path / "out", **shape, **options)
    given = [f"{flag_of(name)}={value}" for name, value in (shape | options).items() if value is not True]
    given += [flag_of(name) for name, value in options.items() if value is True]
    assert re.search(typed, one_error(run_zb("convert", "npy-to-hdf5", tokens, tmp_path / "out", *given)))


def test_settings_have_a_value_for_each_option_that_has_a_default(tokens, tmp_path):
    settings, _ = resolved(Conversion(tokens, "hdf5", tmp_path / "out", batch_size=4, resume=False))
    layout = settings.layout
    assert (layout.batch_size, layout.seed, layout.shuffle, layout.remainder) == (4, 42, True, "drop")
    assert (settings.input.vocab_size, settings.target.dtype) == (0, "auto")
    assert (settings.work.memory, settings.work.shuffle_method, settings.bound_bytes) == (2 << 30, "auto", None)
    assert (settings.work.shard_range, settings.work.resume, settings.work.executor) == (WHOLE, False, "local")
    assert (settings.target.is_one_file, settings.target.codec, settings.target.has_requested_shards) == (
        False,
        "none",
        False,
    )
    assert resolved(Conversion(tokens, "hdf5", tmp_path / "out.h5"))[0].target.is_one_file


@pytest.mark.parametrize("value", ["none", "global", 2])
def test_a_shuffle_that_is_neither_true_nor_false_is_refused(tokens, tmp_path, value):
    with pytest.raises(ArgumentError, match=f"shuffle must be one of True, False, found {value!r}"):
        convert(tokens, "hdf5", tmp_path / "out", shuffle=value)


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("64k", 64_000), ("1MB", 10**6), ("1GiB", 2**30)])
def test_sizes_are_numbers_or_text(text, size):
    conversion = Conversion("a", "hdf5", "b", memory=text, shard_size=text)
    assert (conversion.memory, conversion.shard_size) == (size, size)
    with pytest.raises(ArgumentError, match="memory: 'four' is not a size such as 512MB or 1GiB"):
        Conversion("a", "hdf5", "b", memory="four")


@pytest.mark.parametrize("name", ["shard_size", "memory", "batch_size", "seed"])
def test_true_is_no_number(name):
    with pytest.raises(ArgumentError, match=f"{name} must be a whole number, found True"):
        Conversion("a", "hdf5", "b", **{name: True}).require_possible()


def test_convert_takes_sizes_as_the_command_does(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1 << 16, dtype=np.uint16))
    shape = {"seq_len": 64, "batch_size": 4, "workers": 1}
    report = convert(tmp_path / "a.npy", "hdf5", tmp_path / "out", shard_size="64KiB", memory="1GiB", **shape)
    assert len(report.shards) == 2
