"""The progress of a conversion that is not finished, for `zb info`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zb_hdf5 import UnavailableError
from zb_hdf5.converters.journal import journal_paths, read_journal
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import leftover_of_dead_writer


def describe_interrupted(folder: Path) -> dict[str, Any] | None:
    """Return a JSON-able description of a `.partial/` folder; None if no journal is in it."""
    if isinstance(folder, RemotePath) or not folder.is_dir():
        return None
    records = [read_journal(path, dict) for path in journal_paths(folder).values()]
    if not records:
        return None
    found = {
        "unit": records[0].head.unit,
        "finished": len(set().union(*(record.finished for record in records))),
        "total": records[0].head.total,
    }
    return {"path": str(folder), "kind": "unfinished conversion", "at_work": _is_at_work(folder), **found}


def interrupted_lines(d: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the same for people."""
    next_step = "wait" if d["at_work"] else "go on with the same command and --resume"
    return [
        ("path", d["path"]),
        ("what", "a conversion at work" if d["at_work"] else "an interrupted conversion"),
        ("state", f"{d['finished']:,} of {d['total']:,} {d['unit']} are finished; {next_step}"),
    ]


def _is_at_work(folder: Path) -> bool:
    try:
        with leftover_of_dead_writer(folder):
            return False
    except UnavailableError:
        return True
