"""The facts of a field set in its folder, for programs and in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zb_hdf5.console import counted, format_bytes
from zb_hdf5.errors import NotFoundError
from zb_hdf5.field import Field
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.spec import ABOUT
from zb_hdf5.store.set_facts import SAMPLED, SetFacts
from zb_hdf5.store.set_index import SetIndex
from zb_hdf5.store.set_place import set_folder, sets_of

if TYPE_CHECKING:
    from zb_hdf5.field_sets.set_upkeep import RangeState

#: Words of codes that are shown.
WORDS_SHOWN: Final = 8


def set_summary(folder: Path, facts: SetFacts) -> dict[str, Any]:
    """Return the facts of a set, and how far its jobs are: of one that is not finished the marks of all parts are read.

    Parameters
    ----------
    folder, facts
        The set; its folder may be in a bucket.
    """
    index = _finished_index(folder, facts)
    states: list[RangeState] = []
    if index is None and not isinstance(folder, RemotePath):  # to a bucket only finished ones are uploaded
        from zb_hdf5.field_sets.set_upkeep import range_states  # h5py, which finished ones do not need

        states = list(range_states(folder, facts))
    parts = facts.num_cells if index is None else len(index.parts["path"])
    owners = [(state.first, str(state.owner)) for state in states if state.owner is not None]
    sampled = sum(file.digest.startswith(SAMPLED) for file in facts.files)
    return {
        "name": facts.name,
        "split": facts.split,
        "folder": str(folder),
        "fields": {field.name: field.to_json() for field in facts.fields},
        "about": facts.about,
        "records": facts.num_records,
        "record_tokens": facts.record_tokens,
        "seq_len": facts.seq_len,
        "written": sum(state.done for state in states) if index is None else facts.num_records,
        "bytes": facts.num_records * facts.record_bytes,
        "parts": parts,
        "parts_done": sum(not state.missing for state in states) if index is None else parts,
        "claims": [{"first": first, "owner": owner} for first, owner in owners],
        "finished": index is not None,
        "sha256": "" if index is None else index.sha256,
        "maker": facts.maker,
        "note": facts.note,
        "words": list(facts.words),
        "bound_by": f"a sample of {counted(sampled, 'file')}" if sampled else "digests",
    }


def _finished_index(folder: Path, facts: SetFacts) -> SetIndex | None:
    try:
        index = SetIndex.load(folder, facts)
    except NotFoundError:
        return None
    return index if index.has_all_of(facts) else None


def summaries_of(path: Path) -> list[dict[str, Any]]:
    """Return the facts of all field sets that lie with a path, in order."""
    folders = (set_folder(path, name, split) for name, split in sets_of(path))
    return [set_summary(folder, SetFacts.load(folder)) for folder in folders]


def set_line(summary: dict[str, Any]) -> str:
    """Return a set in one line: its fields, how far it is, and its bytes; of codes their words."""
    written = f"{summary['written']:,} of {summary['records']:,} records"
    facts = [", ".join(summary["fields"]), "finished" if summary["finished"] else written]
    if words := summary["words"]:
        more = ", …" if len(words) > WORDS_SHOWN else ""
        facts.append(f"{counted(len(words), 'word')}: {', '.join(words[:WORDS_SHOWN])}{more}")
    return "; ".join([*facts, format_bytes(summary["bytes"])])


def set_facts_in_words(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a set in lines: its fields, its records, and whatever its maker has named."""
    fields = (Field.from_json(name, each) for name, each in summary["fields"].items())
    written = f"{summary['written']:,} of {summary['records']:,} written"
    lines = [
        ("fields", "; ".join(map(_field_in_words, fields))),
        ("about", "the next token" if summary["about"] == ABOUT[0] else "the token"),
        ("records", f"{written}, {format_bytes(summary['bytes'])} in all"),
    ]
    if summary["seq_len"]:
        lines.append(("windows", f"{summary['seq_len']:,} tokens, every {summary['record_tokens']:,}"))
    lines.append(("bound by", summary["bound_by"]))
    return lines + [(name, summary[name]) for name in ("maker", "note", "sha256") if summary[name]]


def _field_in_words(field: Field) -> str:
    shape = " x ".join(map(str, field.shape))
    return f"{field.name}, {shape and f'{shape} '}{field.kind or field.dtype} a {field.unit}"
