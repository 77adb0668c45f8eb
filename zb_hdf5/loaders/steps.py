"""The steps of a loader are read from the page cache or past it, after hints to the kernel, in threads, to a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import WantedSpans
from zb_hdf5.documents.pieces import IGNORED_TARGET
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.file_systems import is_on_network
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.residency import WATCHED_ONE_IN
from zb_hdf5.files.tokens import Wait
from zb_hdf5.formats.batches import Batches
from zb_hdf5.loaders.ahead import BatchHints, Depth, depth_of, hint_ahead, hinted_steps, read_to, require_prefetch
from zb_hdf5.loaders.direct_batches import DirectBatches
from zb_hdf5.loaders.far_batches import FarBatches
from zb_hdf5.loaders.mapped_records import MappedRecords
from zb_hdf5.loaders.mapped_windows import MappedWindows
from zb_hdf5.loaders.order import PaddedRecords, Request, StepPlan, StoredRequest, requests_in
from zb_hdf5.loaders.step_field import value_count
from zb_hdf5.loaders.step_values import StepValues, WantedFields
from zb_hdf5.loaders.stored_targets import has_targets
from zb_hdf5.loaders.whole_batches import WholeBatches
from zb_hdf5.packages import require_package

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", default=Any)  # so that `Loader` alone is a type, too
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")

#: Tokens, `(x, y)`, or a dictionary of tensors.
Step: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | dict[str, Any]"
#: Steps of a block, at most, that are looked up in the page cache; of scattered records, so many if there are.
MAX_SAMPLE: Final = 32
#: One step in so many of a block of whole batches is looked up, but at least 4.
SAMPLED_ONE_IN: Final = 16


def numpy_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype of tokens as numpy has it, int64 for None; `ArgumentError` unless it is int64 or int32."""
    library = require_package("torch", "torch")
    found = {None: np.int64, library.int64: np.int64, library.int32: np.int32}.get(dtype)
    if found is None:
        raise ArgumentError(f"dtype must be torch.int64 or torch.int32, found {dtype}")
    return np.dtype(found)


def may_overflow(batches: Batches, dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype of tokens may hold too few of the ids of a store, as far as its facts tell."""
    largest = batches.meta.vocab_size - 1 if batches.meta.vocab_size else batches.corpus.max_token
    limit = np.iinfo(dtype).max
    return np.iinfo(batches.dtype).max > limit and (largest is None or largest > limit)


def require_no_overflow(batches: Batches, tokens: npt.NDArray[Any]) -> None:
    """Raise `ArgumentError` if ids of a store became negative in int32, which holds ids below 2**31."""
    least = int(tokens.min(initial=0))
    if least < 0:
        raise ArgumentError(
            f"{batches.path}: expected ids below 2**31, which torch.int32 holds, found {least + 2**32:,}; pass "
            "dtype=torch.int64"
        )


#: How many watched reads of a column had to wait for a disk: a frame of Python for it would be one of each step.
_WAITS: Final = attrgetter("waits")


class StepReader:
    """Reads a request as tokens, two views of them, or a dictionary with more values. As thread-safe as its batches.

    Parameters
    ----------
    batches
        The batches or windows of a corpus.
    seq_len
        Tokens of a record, as the loader gives it.
    mask_documents
        Numbers of documents, ascending.
    device
        None: the steps stay on the CPU.
    targets, prefetch, dtype, fields, documents, spans, labels
        As for `Loader`.

    Attributes
    ----------
    as_dict
        The steps are dictionaries.
    of_one_shape
        Steps of as many records have the same shapes.

    Notes
    -----
    `read_all` takes the steps in blocks, and chooses in two places how each is read. A block in the page cache takes a
    short cut (`_read_ready`): `read_all` of `WholeBatches`, `MappedWindows` or `MappedRecords`. The steps of all others
    are begun before they are given (`_read_waiting`):

    - in threads, and always to a device (`read_to`)
    - with prefetch="auto", on a server: whole batches, several by one request (`FarBatches`)
    - with prefetch="auto", on a local disk: by the kernel, after hints, or past the page cache (`_read_hinted`)
    """

    def __init__(
        self,
        batches: Batches,
        seq_len: int,
        *,
        targets: bool,
        mask_documents: tuple[int, ...],
        prefetch: int | str,
        device: torch.device | None,
        dtype: torch.dtype | None,
        fields: WantedFields,
        documents: bool | Collection[Any],
        spans: WantedSpans,
        labels: str | None = None,
    ) -> None:
        require_prefetch(prefetch)
        self._batches = batches
        self._seq_len = seq_len
        self._prefetch = prefetch
        self._device = device
        self._values: StepValues | None = None  # the steps are tokens, or two views of them
        asked = (fields != (), documents is not False, spans, mask_documents)
        if any(asked) or (targets and (batches.has_padding or has_targets(batches) or batches.num_context)):
            values = StepValues(
                batches,
                seq_len,
                targets=targets,
                mask_documents=mask_documents,
                fields=fields,
                documents=documents,
                spans=spans,
                labels=labels,
            )
            if values.as_dict or values.needs_pieces or values.has_targets or values.has_context:
                self._values = values
        self.as_dict = self._values is not None and self._values.as_dict
        self.of_one_shape = self._values is None or self._values.of_one_shape
        self._splits = targets and self._values is None
        self._dtype = numpy_dtype(dtype)
        narrow = self._dtype == np.int32
        self._may_overflow = may_overflow(batches, self._dtype)
        self._whole = WholeBatches(batches, narrow) if WholeBatches.serves(batches) else None
        self._read_batch: Callable[[int], torch.Tensor] = (
            batches.read_batch_int32 if narrow else batches.read_batch_torch
        )
        if self._whole is not None:
            self._read_batch = self._whole.read_by_position
        is_stream = batches.corpus.is_stream
        self._windows = MappedWindows(batches, self._dtype) if is_stream else None
        self._records = MappedRecords(batches, seq_len, self._dtype)
        self._far: FarBatches | None = None
        if FarBatches.serves(batches) and device is None and self._values is None:
            read = self._read_batch if self._whole is None else self._whole.read
            self._far = FarBatches(batches, self._dtype, read)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batches!r})"

    # --- one step ------------------------------------------------------------------------------------------------

    def read(self, request: Request) -> Step:
        """Read one step on the CPU: a stored batch by its number, or any records by theirs."""
        if isinstance(request, PaddedRecords):
            return self._read_padded(request)
        whole = self._whole
        if whole is not None and isinstance(request, int):
            tokens = self._fitting(whole.read(request))
        else:
            tokens = self._tokens(request)
        return (tokens[:, :-1], tokens[:, 1:]) if self._splits else self._step(request, tokens)

    def _read_padded(self, request: PaddedRecords) -> Step:
        """Read records, and add rows of padding, whose tokens are 0 and no targets."""
        records, num_rows = request
        stored = self._tokens(records)
        tokens = stored.new_zeros((num_rows, self._seq_len))
        tokens[: len(records)] = stored
        if self._values is None:
            step: Any = (tokens[:, :-1], tokens[:, 1:].clone())
        else:
            pieces = self._values.pieces_with_padding(records, num_rows)
            step = self._values.step_of(records, tokens, pieces)
        targets = step["targets"] if self.as_dict else step[1]
        targets[len(records) :] = IGNORED_TARGET
        return cast("Step", step)

    def _read_by_position(self, request: StoredRequest) -> Any:
        return self._step(request, self._tokens(request))

    def _tokens(self, request: StoredRequest) -> torch.Tensor:
        if isinstance(request, int):
            return self._fitting(self._read_batch(request))
        return self._fitting(self._batches.read_records_torch(request, self._seq_len, self._dtype))

    def _fitting(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens of the store, or raise `ArgumentError` if the dtype of the tensors does not hold their ids."""
        if self._may_overflow:
            require_no_overflow(self._batches, tokens.numpy())
        return tokens

    def _step(self, request: StoredRequest, tokens: torch.Tensor) -> Any:
        """Return a step but for the pairs that are two views of the tokens: these are made on the device."""
        if self._values is None:
            return tokens
        return self._values.step_of(request, tokens, self._values.pieces_of_request(request))

    # --- the steps of a plan -------------------------------------------------------------------------------------

    def read_all(self, plan: StepPlan, position: int) -> Generator[Step]:
        """Yield the steps of a plan from a position on."""
        blocks = self._read_blocks(plan, plan.blocks_from(position))
        steps = ((tokens[:, :-1], tokens[:, 1:]) for tokens in blocks) if self._splits else blocks
        last = plan.last_from(position)
        return self._and_last(steps, last) if last else steps

    def _and_last(self, steps: Generator[Step], last: list[Request]) -> Generator[Step]:
        """Yield steps, and then the one that is read by itself: it may have fewer rows, or rows of padding."""
        with contextlib.closing(steps):
            yield from steps
        yield from read_to(self._device, self.read, iter(last), 0, threads=1)

    def _read_blocks(self, plan: StepPlan, blocks: Iterator[npt.NDArray[np.int64]]) -> Generator[Any]:
        """Read blocks in the page cache one after the other, and the rest as is fastest for its disk or server."""
        at_once = self._device is None and self._prefetch in ("auto", 0)
        for (is_ready, axes), group in groupby(blocks, lambda block: (self._is_ready(plan, block), block.ndim)):
            if is_ready and at_once:
                for block in group:
                    yield from self._read_while_ready(plan, block)
            elif is_ready:  # in one thread: reads that do not wait only take the interpreter lock from each other
                steps = chain.from_iterable(repeat(self._read_while_ready(plan, block), len(block)) for block in group)
                yield from read_to(self._device, next, steps, self.depth(plan).steps, threads=1)
            else:
                requests = chain.from_iterable(map(requests_in, group))
                yield from self._read_waiting(plan, requests, is_whole=axes == 1)

    def _is_ready(self, plan: StepPlan, block: npt.NDArray[np.int64]) -> bool:
        """Return whether a sample of some steps, spread evenly, is in the page cache, with the fields of each."""
        batches = self._batches
        if not batches.corpus.is_cached and batches.tokens.wait is not Wait.LOCAL:
            return False
        wanted = MAX_SAMPLE if plan.scattered else max(4, len(block) // SAMPLED_ONE_IN)
        count = min(len(block), wanted, MAX_SAMPLE)
        sample = block[np.arange(count) * len(block) // count]
        if block.ndim == 1:
            records = sample * batches.batch_size
        else:
            records = sample[np.arange(count), np.arange(count) % sample.shape[1]]
        return all([column.are_cached(records, self._seq_len * value_count(column)) for column in self._columns])

    def _read_while_ready(self, plan: StepPlan, block: npt.NDArray[np.int64]) -> Iterator[Any]:
        """Yield the steps of a block in the page cache; those after one that had to wait for a disk are hinted at."""
        return chain.from_iterable(self._groups_while_ready(plan, block))

    def _groups_while_ready(self, plan: StepPlan, block: npt.NDArray[np.int64]) -> Iterator[Iterable[Any]]:
        """Yield groups of these steps: a frame of Python for each step would take as long as a watched one in 32."""
        steps = self._read_ready(block)
        if block.ndim == 1 and self._whole is not None and self._whole.gives_views:  # their pages are not read here
            yield steps
            return
        residencies = [column.tokens.pages.residency for column in self._columns]
        for first in range(0, len(block), WATCHED_ONE_IN):
            waits = sum(map(_WAITS, residencies))
            yield (residencies[0].watch(next, steps),)
            if sum(map(_WAITS, residencies)) != waits:
                rest = iter(requests_in(block[first + 1 :]))
                is_whole = block.ndim == 1
                hinted = self._prefetch != 0
                yield self._read_hinted(plan, rest, is_whole) if hinted else map(self._read_by_position, rest)
                return
            yield islice(steps, WATCHED_ONE_IN - 1)

    def _read_ready(self, block: npt.NDArray[np.int64]) -> Iterator[Any]:
        """Yield the steps of a block in the page cache."""
        tokens: Iterator[torch.Tensor]
        if block.ndim > 1:
            tokens = self._records.read_all(block, self._tokens)
        elif self._whole is not None:
            tokens = self._whole.read_all(block)
        elif self._windows is not None:
            tokens = self._windows.read_all(block, self._tokens)
        else:
            tokens = map(self._tokens, block.tolist())
        if self._may_overflow:
            tokens = map(self._fitting, tokens)
        return tokens if self._values is None else self._values.steps_of(block, tokens)

    def _read_waiting(self, plan: StepPlan, requests: Iterator[Any], is_whole: bool) -> Iterator[Any]:
        """Read steps that are not in the page cache."""
        depth, threads = self.depth(plan)
        if self._prefetch == "auto" and not depth:
            return self._read_hinted(plan, requests, is_whole)
        if self._prefetch == "auto" and is_whole and self._far is not None:
            return self._read_far(self._far.read_all(requests, depth))
        return read_to(self._device, self._read_by_position, requests, depth, threads)

    def _read_far(self, steps: Generator[torch.Tensor]) -> Generator[torch.Tensor]:
        with contextlib.closing(steps):
            yield from map(self._fitting, steps)

    def _read_hinted(self, plan: StepPlan, requests: Iterator[Any], is_whole: bool) -> Iterator[Any]:
        """Read steps of a local disk one after the other, later ones being under way."""
        depth = hinted_steps(plan.batch_size if plan.scattered else 1, self.step_bytes(plan))
        if plan.scattered:
            return hint_ahead(self._read_by_position, self.announce, requests, depth)
        if is_whole and self._whole is not None and self._whole.outruns_memory:
            return self._read_past_cache(plan, requests, depth)
        return hint_ahead(self._read_by_position, self._hints(plan, self._columns).announce, requests, depth)

    def _read_past_cache(self, plan: StepPlan, numbers: Iterator[int], hinted: int) -> Generator[Any]:
        """Read whole stored batches past the page cache, but for their fields, which are hinted at."""
        tokens, *fields = self._columns
        announce_fields = self._hints(plan, fields).announce
        direct = DirectBatches(cast(WholeBatches, self._whole), self._hints(plan, [tokens]).announce)

        def announce(some: list[int]) -> None:
            direct.announce(some)
            if fields:
                announce_fields(some)

        def read_step(number: int) -> Any:
            return self._step(number, self._fitting(direct.read(number)))

        with contextlib.closing(direct):
            read = read_step if self._may_overflow or self._values is not None else direct.read
            yield from hint_ahead(read, announce, numbers, min(direct.depth, hinted) if fields else direct.depth)

    def _hints(self, plan: StepPlan, columns: Sequence[Batches]) -> BatchHints:
        return BatchHints([column.will_need for column in columns], plan.records_per_batch)

    @property
    def _columns(self) -> list[Batches]:
        """The tokens, and the fields that are read with them."""
        return [self._batches, *(self._values.columns if self._values else ())]

    def announce(self, requests: Sequence[Request]) -> None:
        """Announce the tokens and the fields of requests in any order, unless they are in memory."""
        numbers = [one for one in requests if isinstance(one, int)]
        if numbers and not (self._whole is not None and self._whole.is_ready()):
            for column in self._columns:
                for number in numbers:
                    column.will_need(number)
        rows = [one.records if isinstance(one, PaddedRecords) else one for one in requests if not isinstance(one, int)]
        if rows:
            records = np.concatenate(rows)
            for column in self._columns:
                column.announce_records(records, self._seq_len * value_count(column))

    def step_bytes(self, plan: StepPlan) -> int:
        """Return the bytes of the tokens and the fields of a step."""
        items = sum(value_count(column) * column.dtype.itemsize for column in self._columns)
        return plan.batch_size * self._seq_len * items

    def depth(self, plan: StepPlan) -> Depth:
        """Return how many steps to read ahead, and in how many threads."""
        batches = self._batches
        step_reads = plan.batch_size if plan.scattered else 1
        step_bytes = plan.batch_size * self._seq_len * batches.dtype.itemsize
        return depth_of(
            self._prefetch, batches.tokens, lambda: self._is_on_network, self._device, step_bytes, step_reads
        )

    @cached_per_process
    def _is_on_network(self) -> bool:
        """Whether the files come over a network, asked once, by the first step that waits: there it is a request."""
        return is_on_network(self._batches.path)

    def close(self) -> None:
        """Drop the arrays that are kept between single steps."""
        if self._whole is not None:
            self._whole.close()
