"""The upkeep of a field set in its folder: its state and its end, damaged values, claims that are let go, removal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from zb_hdf5.errors import ArgumentError, FormatError, UnavailableError
from zb_hdf5.field_sets.claimed_range import ClaimedRange
from zb_hdf5.field_sets.part_claim import STALE_S, Owner, claim_path, drop_leftovers, owner_of_claim, release_by_hand
from zb_hdf5.files.objects import delete_objects, list_objects, put_object
from zb_hdf5.files.paths import RemotePath, any_path, read_whole
from zb_hdf5.files.publishing import published, write_fully
from zb_hdf5.spec import SET_FACTS, SET_GROWN, SET_INDEX, SETS_FOLDER, SETS_SUFFIX, VALUES_PREFIX
from zb_hdf5.store.set_facts import SetFacts, grown_files, part_name
from zb_hdf5.store.set_index import SetIndex, index_of, parts_in
from zb_hdf5.store.value_part import ValuePart

#: The beginnings of the names of the files of a set.
_FILES_OF_SET: Final = (SET_FACTS, SET_INDEX, SET_GROWN, VALUES_PREFIX)
#: The index of a set whose objects are uploaded at this moment.
_UPLOADED: Final = "index.uploaded.json"


class RangeState(NamedTuple):
    """The state of one range of records.

    Attributes
    ----------
    first, stop
        The records.
    done
        Those that are written.
    claim
        The path of its claim, which need not exist.
    owner
        The process that has it; None: nobody has.
    """

    first: int
    stop: int
    done: int
    claim: Path
    owner: Owner | None

    @property
    def missing(self) -> int:
        """Records that are not written."""
        return self.stop - self.first - self.done


def state_of(folder: Path, facts: SetFacts, number: int) -> RangeState:
    """Return the state of a range by its number, from its marks and its claim as they are now."""
    first, stop = facts.cell(number)
    done = 0
    start = first  # its parts follow each other: no folder of thousands is listed
    while start < stop and (path := folder / part_name(start)).exists():
        with closing(ValuePart(path, facts)) as part:
            done += int(part.is_there().sum())
        start += max(1, part.layout.records)
    claim = claim_path(folder / part_name(first))
    return RangeState(first, stop, done, claim, owner_of_claim(claim))


def range_states(folder: Path, facts: SetFacts) -> Iterator[RangeState]:
    """Yield the state of each range of records."""
    return (state_of(folder, facts, number) for number in range(facts.num_cells))


def finish_set(folder: Path, facts: SetFacts, stale_s: float = STALE_S) -> str:
    """See that all records are written, make the index of a set, and return its digest. Raises as `FieldSet.finish`."""
    for number in range(facts.num_cells):
        claim = claim_path(folder / part_name(facts.cell(number)[0]))
        if not claim.exists():
            continue
        found = ClaimedRange.take(folder, facts, number, stale_s)  # of an owner that died: its values are read once
        if found is None:
            raise UnavailableError(f"{claim}: {owner_of_claim(claim) or 'another process'} still writes")
        found.end()
    drop_leftovers(folder, stale_s)
    index = index_of(folder, facts)
    with published(folder / SET_INDEX, overwrite=True) as file:
        write_fully(file.fd, index.to_json().encode(), 0)
    return index.sha256


def damaged_records(folder: Path, facts: SetFacts, progress: Callable[[int], None] = lambda _: None) -> list[int]:
    """Read all values that are marked, and return the records whose crc32 differs.

    Parameters
    ----------
    progress
        Called with the records of each part that was read.
    """
    bad: list[int] = []
    for first, path in parts_in(folder):
        with closing(ValuePart(path, facts)) as part:
            bad += (part.damaged() + first).tolist()
            progress(part.layout.records)
    return bad


def release_claims(folder: Path, facts: SetFacts, *, host: str = "", job: str = "") -> list[tuple[int, Owner]]:
    """Let claims on the parts of a set go; return the first record of each, and its owner.

    Parameters
    ----------
    host, job
        Claims of this host, or of this job of the scheduler, alone; "": of any.
    """
    released = []
    for number in range(facts.num_cells):
        first = facts.cell(number)[0]
        owner = owner_of_claim(claim_path(folder / part_name(first)))
        if owner is not None and host in ("", owner.host) and job in ("", owner.job):
            release_by_hand(folder / part_name(first))
            released.append((first, owner))
    return released


def upload_set(
    folder: Path, facts: SetFacts, url: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Copy a finished set to a bucket, its index last; return the bytes that were sent.

    Objects that are there with all of their bytes are kept, so that an upload that ended early goes on. Parts of an
    earlier set of this name are replaced, unless they have the same digest.

    Parameters
    ----------
    url
        The URL of the folder in the bucket: of a store, `<url of the store>/fields/<name>/<split>`.
    progress
        Called with the bytes of each file that is there now, and the bytes of all files.

    Raises
    ------
    NotFoundError
        If the set is not finished.
    """
    place = any_path(url)
    if not isinstance(place, RemotePath):
        raise ArgumentError(f"expected a URL such as s3://bucket/train-h5/fields/{facts.name}/train, found {url}")
    index = SetIndex.load(folder, facts)
    present = _begin_upload(place, facts, index)
    texts = [*grown_files(folder), folder / SET_FACTS, folder / SET_INDEX]  # a few KB, which are sent each time
    sizes = {path: path.stat().st_size for path in [*(folder / name for name in index.parts["path"]), *texts]}
    total = sum(sizes.values())
    sent = 0
    for path, size in sizes.items():
        if present.get(path.name) != size or path in texts:
            put_object(f"{place.url}/{path.name}", path)
            sent += size
        progress(size, total)
    delete_objects(place.url, [_UPLOADED])
    return sent


def _begin_upload(place: RemotePath, facts: SetFacts, index: SetIndex) -> dict[str, int]:
    """Return the size of each object of this set that is there, after the objects of an earlier set are deleted.

    The index that is uploaded lies there meanwhile by another name: what an upload that ended early left is of this
    set if it is the same.
    """
    present = list_objects(place.url)
    text = index.to_json()
    if _UPLOADED in present and read_whole(place / _UPLOADED) == text.encode():
        return present
    known = _digests_at(place, facts) if SET_INDEX in present else {}
    ours = dict(zip(index.parts["path"], index.parts["sha256"], strict=True))
    same = {name for name, sha256 in ours.items() if known.get(name) == sha256}
    others = [name for name in present if name.startswith((VALUES_PREFIX, SET_GROWN)) and name not in same]
    delete_objects(place.url, others)
    if others:
        delete_objects(place.url, [SET_INDEX])
    put_object(f"{place.url}/{_UPLOADED}", text.encode())
    return {name: size for name, size in present.items() if name in same}


def _digests_at(place: RemotePath, facts: SetFacts) -> dict[str, str]:
    """Return the digest of each part of an earlier set; none of a set that had other fields."""
    try:
        parts = SetIndex.load(place, facts).parts
    except FormatError:
        return {}
    return dict(zip(parts["path"], parts["sha256"], strict=True))


def drop_set(folder: Path, facts: SetFacts) -> int:
    """Remove a set with all of its values, and return the bytes that are free then.

    Raises
    ------
    ArgumentError
        If the folder has other files, too.
    UnavailableError
        If a process still writes to it.
    """
    for state in range_states(folder, facts):
        if state.owner is not None and not state.owner.is_dead:
            raise UnavailableError(f"{state.claim}: {state.owner} still writes: end it, or release its claim")
    paths = sorted(folder.iterdir())
    if others := [path.name for path in paths if not path.name.lstrip(".").startswith(_FILES_OF_SET)]:
        raise ArgumentError(f"{folder}: has files that are not of the field set: {others[0]}; move them away")
    num_bytes = sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    folder.rmdir()
    name, sets = folder.parent, folder.parent.parent
    if name.name == facts.name and (sets.name == SETS_FOLDER or sets.name.endswith(SETS_SUFFIX)):
        for above in (name, sets):
            if any(above.iterdir()):
                break
            above.rmdir()
    return num_bytes
