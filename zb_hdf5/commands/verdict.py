"""The report and the exit code of `zb verify`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

from zb_hdf5.console import counted, format_count, message_of, typed
from zb_hdf5.errors import ChecksumError, FormatError, UnverifiableError, ZbError
from zb_hdf5.files.paths import any_path
from zb_hdf5.store.verify_report import Outcome, ShardReport

_WORDS: Final = {Outcome.VERIFIED: "verified", Outcome.UNVERIFIED: "NOT VERIFIED", Outcome.BAD: "BAD"}
_ABOUT_ONE: Final = {
    Outcome.VERIFIED: "the file is as it was written",
    Outcome.UNVERIFIED: "there is nothing to compare the file with",
    Outcome.BAD: "the file is not as it was written, or not finished",
}


def outcome_of(reports: list[ShardReport]) -> Outcome:
    """Return the worst outcome of all files."""
    found = {report.outcome for report in reports}
    return next(outcome for outcome in (Outcome.BAD, Outcome.UNVERIFIED, Outcome.VERIFIED) if outcome in found)


def exit_code(reports: list[ShardReport]) -> int:
    """Return 0 if every file was verified, 6 if one could not be, and the code of its error if one is bad."""
    problems = [report.problem for report in reports if report.problem is not None]
    if problems:
        return max(map(_code_of, problems))
    return UnverifiableError.exit_code if outcome_of(reports) is Outcome.UNVERIFIED else 0


def _code_of(problem: ZbError) -> int:
    """Damaged metadata is damage: elsewhere a malformed file may be a mistake of the user's."""
    damaged = isinstance(problem, FormatError) and problem.exit_code == FormatError.exit_code
    return ChecksumError.exit_code if damaged else problem.exit_code


def verdict_json(reports: list[ShardReport]) -> dict[str, Any]:
    """Return the verdict and every report."""
    outcome = outcome_of(reports)
    files = [
        {
            **vars(report),
            "outcome": report.outcome,
            "missing": _missing(report),
            "problem": None if report.problem is None else message_of(report.problem),
        }
        for report in reports
    ]
    return {"ok": outcome is Outcome.VERIFIED, "outcome": outcome, "files": files}


def verdict_lines(path: Path, reports: list[ShardReport]) -> list[tuple[str, str]]:
    """Return a line for each file, named by its path in `path`, and the verdict."""
    lines = [("path", str(path))]
    if len(reports) > 1 or any_path(reports[0].path) != path:
        folder = path if path.is_dir() else path.parent
        lines += [(_name(report, folder), _line(report)) for report in reports]
    else:
        lines.append(("file", _line(reports[0])))
    return [*lines, ("result", _result(reports))]


def _name(report: ShardReport, folder: Path) -> str:
    place = any_path(report.path)
    return str(place.relative_to(folder)) if place.is_relative_to(folder) else report.path


def _line(report: ShardReport) -> str:
    if report.problem is not None:
        return f"BAD: {message_of(report.problem)}"
    size = f"{format_count(report.token_count).strip()} tokens"
    if report.num_batches:
        size = counted(report.num_batches, "batch")
    if report.document_count:
        size = counted(report.document_count, "document")
    if report.missing:
        return f"NOT VERIFIED: {size}: {_missing(report)}"
    return f"verified: {size} ({', '.join(report.checks)})"


def _missing(report: ShardReport) -> str:
    return typed(report.missing, report.path)


def _result(reports: list[ShardReport]) -> str:
    counts, outcome = Counter(report.outcome for report in reports), outcome_of(reports)
    if len(reports) == 1:
        return f"{_WORDS[outcome]}: {_ABOUT_ONE[outcome]}"
    parts = [f"{_WORDS[outcome]}: {counts[Outcome.VERIFIED]:,} of {len(reports):,} files are as they were written"]
    if counts[Outcome.UNVERIFIED]:
        parts.append(f"{counts[Outcome.UNVERIFIED]:,} could not be compared with anything")
    if counts[Outcome.BAD]:
        parts.append(f"{counts[Outcome.BAD]:,} not")
    return ", ".join(parts)
