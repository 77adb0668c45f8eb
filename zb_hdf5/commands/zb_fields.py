"""`zb fields`: the field sets of a store, which other jobs have made for its tokens."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from zb_hdf5.console import (
    FROM_1,
    LOCAL,
    SIZE,
    Output,
    Parsed,
    Progress,
    counted,
    format_bytes,
    format_seconds,
    output_options,
)
from zb_hdf5.errors import ArgumentError
from zb_hdf5.option_groups import GroupedCommand, option_group

if TYPE_CHECKING:
    from zb_hdf5.field import Field
    from zb_hdf5.formats.corpus import Corpus
    from zb_hdf5.store.set_facts import SetFacts

_place_option = option_group("Place of the set")
_values_option = option_group("Fields that jobs fill")
_codes_option = option_group("Codes of documents")
_removal_option = option_group("Removal")
_claims_option = option_group("Claims")


class SetFolder(NamedTuple):
    """A field set in its folder."""

    folder: Path
    facts: SetFacts


def set_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the path, the name of a set, and the options that tell where it lies; the command gets a `SetFolder`."""

    @click.argument("path", type=LOCAL)
    @click.argument("name")
    @_place_option("--split", default="train", help="The split of the tokens.")
    @_place_option("--path", "folder", type=LOCAL, help="The folder of the set. [default: with the tokens]")
    @functools.wraps(command)
    def run(path: Path, name: str, split: str, folder: Path | None, **given: Any) -> Any:
        from zb_hdf5.store.set_place import facts_at, set_folder

        place = folder or set_folder(path, name, split)
        return command(found=SetFolder(place, facts_at(place, name, path)), **given)

    return run


@click.group("fields")
def zb_fields() -> None:
    """Show, finish and remove field sets: values that jobs have computed for finished tokens.

    \b
    Example: zb fields list data/train
    """


@zb_fields.command("list", short_help="List the field sets of a path.")
@click.argument("path", type=LOCAL)
@output_options
def zb_fields_list(path: Path) -> Output:
    """List the field sets that lie with PATH.

    \b
    Example: zb fields list data/train
    """
    from zb_hdf5.commands.set_summary import set_line, summaries_of

    found = summaries_of(path)
    lines = [(f"{each['name']} ({each['split']})", set_line(each)) for each in found]
    return Output({"path": str(path), "sets": found}, lines or [("sets", f"none: {path} has no field sets")])


@zb_fields.command("info", cls=GroupedCommand, short_help="Describe a field set, and how far its jobs are.")
@set_arguments
@output_options
def zb_fields_info(found: SetFolder) -> Output:
    """Describe the field set NAME of PATH: fields, maker, records that are written, and who has which parts.

    \b
    Example: zb fields info data/train teacher
    """
    from zb_hdf5.commands.set_summary import set_facts_in_words, set_summary
    from zb_hdf5.spec import SET_FACTS

    facts = set_summary(*found)
    rate, left_s = _pace(facts, time.time() - (found.folder / SET_FACTS).stat().st_mtime)
    lines = [
        ("set", f"{facts['name']} ({facts['split']}) in {facts['folder']}"),
        *set_facts_in_words(facts),
        ("parts", f"{facts['parts_done']:,} of {facts['parts']:,} done"),
        *[("claimed", f"from record {claim['first']:,} by {claim['owner']}") for claim in facts["claims"]],
    ]
    if facts["finished"]:
        lines.append(("state", "finished"))
    elif rate:
        lines.append(("rate", f"{rate:,.1f} records/s since it was made, {format_seconds(left_s)} left"))
    return Output({**facts, "records_per_s": rate, "left_s": left_s}, lines)


def _pace(facts: dict[str, Any], age_s: float) -> tuple[float, float]:
    """Return the records in a second since a set was made, and the seconds for the rest."""
    rate = facts["written"] / age_s if age_s > 0 else 0.0
    return rate, (facts["records"] - facts["written"]) / rate if rate else 0.0


@zb_fields.command("finish", cls=GroupedCommand, short_help="Make the index of a set whose records are all written.")
@set_arguments
@output_options
def zb_fields_finish(found: SetFolder) -> Output:
    """See that all records of the field set NAME of PATH are written, and make its index.

    \b
    Example: zb fields finish data/train teacher
    """
    from zb_hdf5.field_sets.set_upkeep import finish_set

    sha256 = finish_set(found.folder, found.facts)
    return Output(
        {"folder": str(found.folder), "records": found.facts.num_records, "sha256": sha256},
        [("finished", f"{found.folder}: {counted(found.facts.num_records, 'record')}"), ("sha256", sha256)],
    )


@zb_fields.command("verify", cls=GroupedCommand, short_help="Compare all values of a set with their crc32.")
@set_arguments
@output_options
def zb_fields_verify(found: SetFolder) -> Output:
    """Read all values of the field set NAME of PATH, and compare each record with its crc32.

    \b
    Example: zb fields verify data/train teacher
    """
    from zb_hdf5.commands.set_summary import set_summary
    from zb_hdf5.errors import ChecksumError
    from zb_hdf5.field_sets.set_upkeep import damaged_records

    with Progress("verify", found.facts.num_records, unit="records") as progress:
        bad = damaged_records(found.folder, found.facts, progress.advance)
    written = set_summary(*found)["written"]
    text = f"{counted(written, 'record')} are whole"
    if bad:
        again = f"missing(overwrite=({bad[0]}, {bad[0] + 1})) of open_field_set gives the first one to write again"
        text = f"damaged: records {', '.join(map(str, bad[:10]))}; {again}"
    report = {"folder": str(found.folder), "records": written, "damaged": bad}
    return Output(report, [("verified", text)], exit_code=ChecksumError.exit_code if bad else 0)


@zb_fields.command("release", cls=GroupedCommand, short_help="End the claims of jobs on the parts of a set.")
@set_arguments
@_claims_option("--host", default="", help="Claims of processes of this host alone.")
@_claims_option("--job", default="", help="Claims of this job of the scheduler alone.")
@output_options
def zb_fields_release(found: SetFolder, host: str, job: str) -> Output:
    """End the claims of jobs on parts of the field set NAME of PATH, for jobs that are dead and cannot be asked.

    A job that is alive all the same ends at its next write. Whoever takes such a part next compares its values first.

    \b
    Example: zb fields release data/train teacher --host node17
    """
    from zb_hdf5.field_sets.set_upkeep import release_claims

    released = release_claims(found.folder, found.facts, host=host, job=job)
    return Output(
        {"released": [{"first": first, "owner": str(owner)} for first, owner in released]},
        [("released", f"from record {first:,}: {owner}") for first, owner in released] or [("released", "none")],
    )


@zb_fields.command("drop", cls=GroupedCommand, short_help="Remove a field set with all of its values.")
@set_arguments
@_removal_option("--yes", is_flag=True, help="Remove it without a question.")
@output_options
def zb_fields_drop(found: SetFolder, yes: bool) -> Output:
    """Remove the field set NAME of PATH with all of its values. The tokens stay.

    \b
    Example: zb fields drop data/train teacher --yes
    """
    from zb_hdf5.commands.set_summary import set_summary
    from zb_hdf5.field_sets.set_upkeep import drop_set

    if not yes:
        written = set_summary(*found)["written"]
        click.confirm(f"Remove {found.folder}, with the values of {counted(written, 'record')}?", abort=True)
    num_bytes = drop_set(found.folder, found.facts)
    return Output(
        {"removed": str(found.folder), "num_bytes": num_bytes},
        [("removed", f"{found.folder}, {format_bytes(num_bytes)}")],
    )


@zb_fields.command("upload", cls=GroupedCommand, short_help="Copy a finished set to a bucket.")
@set_arguments
@click.argument("url")
@output_options
def zb_fields_upload(found: SetFolder, url: str) -> Output:
    """Copy the finished field set NAME of PATH to the folder URL of a bucket. An upload that ended early goes on.

    A loader finds it with a store there, if URL is <store>/fields/NAME/train.

    \b
    Example: zb fields upload st teacher s3://bucket/st/fields/teacher/train
    """
    from zb_hdf5.field_sets.set_upkeep import upload_set

    with Progress("upload", 0, unit="B") as progress:
        sent = upload_set(found.folder, found.facts, url, progress.advance)
    return Output({"url": url, "num_bytes": sent}, [("uploaded", f"{url}: {format_bytes(sent)} sent")])


def _field_named(text: str) -> tuple[str, tuple[str, tuple[int, ...]], str]:
    """Return the name, the kind and the unit of logprobs=f2:64, reward=f4/record, or half=bfloat16."""
    match = re.fullmatch(r"(\w+)=(\w+)(?::(\d+(?:x\d+)*))?(?:/(token|record|document))?", text)
    if match is None:
        raise ArgumentError(f"expected a field such as logprobs=f2:64 or reward=f4/record, found {text!r}")
    shape = tuple(map(int, match[3].split("x"))) if match[3] else ()
    return match[1], (match[2], shape), match[4] or "token"


@zb_fields.command("make", cls=GroupedCommand, short_help="Make a set for jobs to fill, or codes of the documents.")
@click.argument("path", type=LOCAL)
@click.argument("name")
@_values_option(
    "--field",
    "fields",
    type=Parsed("NAME=DTYPE[:K][/UNIT]", _field_named),
    multiple=True,
    help="A field of the set, such as logprobs=f2:64 or reward=f4/record; may be given repeatedly.",
)
@_values_option(
    "--about", type=click.Choice(["next", "token"]), help="The token that a value is about. [default: next]"
)
@_values_option("--seq-len", type=FROM_1, help="Tokens of the windows of a stream that the maker of the values sees.")
@_values_option("--stride", type=FROM_1, help="Tokens from one of these windows to the next. [default: --seq-len]")
@_values_option("--maker", help="The model and the revision that make the values.")
@_values_option("--note", help="Words for people.")
@_values_option("--part-bytes", type=SIZE, help="Bytes of a part, about. [default: 8GiB, or 1/1024 of a smaller set]")
@_codes_option("--meta", "key", help="The key of the metadata of documents whose values become codes.")
@_place_option("--split", default="train", help="The split of the tokens.")
@_place_option("--path", "folder", type=LOCAL, help="The folder of the set. [default: with the tokens]")
@click.option("--dry-run", is_flag=True, help="Describe the set and the room that it takes, and write nothing.")
@output_options
def zb_fields_make(
    path: Path,
    name: str,
    fields: tuple[Any, ...],
    key: str | None,
    split: str,
    folder: Path | None,
    dry_run: bool,
    **given: Any,
) -> Output:
    """Make the field set NAME of PATH: fields that jobs fill, or a code for each document.

    Jobs open a set with fields by open_field_set(PATH, NAME). A loader gives codes, of the values of a key of the
    metadata, by documents=["meta:NAME"].

    \b
    Example: zb fields make text-h5 lang --meta lang
    Example: zb fields make data/train weights --field weight=f4 --about token \\
               --dry-run
    """
    from zb_hdf5.field_sets.document_words import field_of_codes, make_words
    from zb_hdf5.store.opening import open_corpus

    options = {option: value for option, value in given.items() if value is not None}
    if bool(fields) == bool(key) or (key and options):
        raise click.UsageError("pass --field, once or more, or --meta alone")
    with open_corpus(path, split=split) as corpus:
        if dry_run:
            return _planned(corpus, name, [field_of_codes()] if key else _fields_of(fields), folder, options)
        if not key:
            return _made(corpus, name, _fields_of(fields), folder, options)
        with Progress("fields", 0, unit="docs") as progress:
            total = len(corpus.require_documents())
            words = make_words(corpus, name, key, path=folder, progress=lambda done: progress.advance(done, total))
    return Output(
        {"name": name, "key": key, "words": words},
        [("made", f"{name}: {counted(len(words), 'value')} of {key}: {', '.join(words[:8])}")],
    )


def _fields_of(named: tuple[Any, ...]) -> list[Field]:
    """Return fields as the command line names them."""
    from dataclasses import replace

    from zb_hdf5.field_sets.asked_set import parse_set_fields

    return [replace(parse_set_fields({name: kind})[0], unit=unit) for name, kind, unit in named]


def _planned(corpus: Corpus, name: str, fields: list[Field], folder: Path | None, options: dict[str, Any]) -> Output:
    from zb_hdf5.errors import ConvertError
    from zb_hdf5.field_sets.asked_set import plan_field_set

    of_cut = {option: options[option] for option in ("seq_len", "stride", "part_bytes") if option in options}
    plan = plan_field_set(corpus, name, fields, path=folder, **of_cut)
    return Output(plan.to_json(), plan.lines(), exit_code=ConvertError.exit_code if plan.lack else 0)


def _made(corpus: Corpus, name: str, fields: list[Field], folder: Path | None, options: dict[str, Any]) -> Output:
    from zb_hdf5.field_sets.asked_set import open_field_set

    with open_field_set(corpus, name, fields, path=folder, **options) as made:
        facts = made.facts
        report = {"name": name, "folder": str(made.folder), "records": facts.num_records, "parts": facts.num_cells}
        size = f"{counted(facts.num_records, 'record')} in {counted(facts.num_cells, 'part')}"
    return Output(report, [("made", f"{made.folder}: {size}, which jobs fill by open_field_set({name!r})")])
