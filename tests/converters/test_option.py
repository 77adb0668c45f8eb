"""Each option of a conversion is declared once: what its declarations have to agree on."""

from dataclasses import fields
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import click
import numpy as np
import pytest
from contents import write_stream

from zb_hdf5 import ArgumentError, convert
from zb_hdf5.commands.zb_info import zb_info
from zb_hdf5.converters.command_options import option_of
from zb_hdf5.converters.conversion import OPTION_CLASSES, OPTION_GROUPS, OPTIONS, Conversion
from zb_hdf5.converters.option import Role
from zb_hdf5.converters.resolution import resolved
from zb_hdf5.converters.sources import sources
from zb_hdf5.read_as import ARGUMENTS
from zb_hdf5.store.format_list import document_targets


def types_of(hint):
    """Return the classes of the values that a type has."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(part) or part for part in parts)


@pytest.mark.parametrize("group", OPTION_GROUPS)
def test_each_default_is_of_the_type_that_its_option_declares(group):
    kind = OPTION_CLASSES[group]
    hints = get_type_hints(kind)
    for each in fields(kind):
        for taking in OPTIONS[each.name].takers.values():
            assert isinstance(taking.default, types_of(hints[each.name])), (each.name, taking)


def test_each_role_takes_some_option_and_choices_are_of_the_kind_of_their_option():
    assert {role for option in OPTIONS.values() for role in option.takers} == {*Role}
    for name, option in OPTIONS.items():
        for taking in option.takers.values():
            assert {*taking.choices} <= {*option.kind} or not taking.choices, name


def test_an_argument_of_read_as_has_the_same_words_in_each_command():
    shown = {each.name: each for each in zb_info.params if each.name in ARGUMENTS}
    assert shown.keys() == ARGUMENTS.keys()
    for name in ARGUMENTS.keys() & OPTIONS.keys():
        of_a_conversion = option_of(name)(click.Command("c", callback=lambda: None)).params[0]
        assert shown[name].help.startswith(of_a_conversion.help), name
        assert (shown[name].opts, shown[name].type.name) == (of_a_conversion.opts, of_a_conversion.type.name)


def test_no_source_names_an_option_that_files_of_another_trainer_refuse():
    unused = {name for name, option in OPTIONS.items() if not option.of_trainers}
    assert "shard_size" in unused
    named = {
        (source, target): found
        for source, kind in sources().items()
        for target in document_targets()
        if (found := unused & kind.options_of(target).keys())
    }
    assert not named


def test_a_conversion_has_each_option_as_it_was_given_and_no_other(tmp_path):
    conversion = Conversion("a.npy", "hdf5", tmp_path / "out", batch_size=4, resume=False, memory="1MiB", seed=None)
    assert (conversion.batch_size, conversion.memory, conversion.seed, conversion.shards) == (4, 1 << 20, None, None)
    assert conversion.given == {"batch_size", "memory"}
    changed = conversion.changed(target="batch", batch_size=8)
    assert (changed.target, changed.batch_size, changed.memory, changed.destination) == (
        "batch",
        8,
        1 << 20,
        tmp_path / "out",
    )
    with pytest.raises(ArgumentError, match="a conversion has no option batchsize; did you mean batch_size"):
        conversion.changed(batchsize=8)
    with pytest.raises(AttributeError, match="a conversion has no batchsize"):
        _ = conversion.batchsize


def test_settings_have_the_value_of_each_option_by_its_name(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.uint16))
    given = {"dtype": "uint32", "batch_size": 2, "vocab_size": 64, "workers": 1}
    settings, _ = resolved(Conversion(tmp_path / "a.npy", "hdf5", tmp_path / "out", **given))
    assert {name: settings.option(name) for name in given} == given
    assert (settings.option("remainder"), settings.option("packing")) == ("drop", "concat")


@pytest.mark.parametrize(("dtype", "hint"), [("uint32", False), (None, True)])
def test_a_dtype_that_was_asked_for_gets_no_hint_to_take_another(dtype, hint, tmp_path):
    for name in ("a.h5", "b.h5"):
        write_stream(tmp_path / name, np.arange(1000), [10] * 100, dtype="uint32")
    report = convert([tmp_path / "a.h5", tmp_path / "b.h5"], "stream", tmp_path / "out", dtype=dtype)
    assert report.lacks_vocab_size is hint
