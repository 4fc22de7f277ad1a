"""Keys and values of sequences in pages of a fixed size (Kwon et al. 2023, PagedAttention)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch

from jitkern.errors import JitkernError
from jitkern.kernels_src.paged_decode.pages import Pages

LAYOUTS = ("NHD", "HND")


class KVCacheFull(JitkernError):
    """A PagedCache has too few pages, `free` of the `needed` ones, or no row, then both are 0."""

    needed: int = 0
    free: int = 0


class PagedCache:
    """Paged memory for the keys and values of many sequences.

    A sequence is a row of the block table. It owns pages, each for `page_size` tokens in all
    layers, and takes a new one from the free list when its last page is full. Forks share pages
    until one of them writes into a page, which then gets a copy. The host knows which pages are
    free, so nothing waits for the device. Changes on the device are queued on the current stream,
    and the ops that use the cache must run on the same stream. While that stream captures a CUDA
    graph, what changes sequences raises RuntimeError: the graph would repeat these very changes. An
    object belongs to one thread at a time.

    pages: how many pages there are. heads, head_size: of a key, and of a value.
    sequences: how many sequences there can be at once, the rows of the block table.
    max_length: tokens of the longest sequence, by default as many as all pages hold.
    layout: "NHD" keeps a page as [page_size, heads, head_size], "HND" as [heads, page_size,
        head_size]. Ops take both: `keys` and `values` return views of one shape.

    block_table: int32 [sequences, pages of the longest sequence] on the device.
    seq_lens: int32 [sequences] on the device, tokens of each sequence; 0 in rows without one. Both
        tensors stay where they are, so a CUDA graph may read them.

    Raises ValueError for sizes that are not positive, and for an unknown layout.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor

    def __init__(
        self, pages: int, heads: int, head_size: int, *, sequences: int, layers: int = 1,
        page_size: int = 16, max_length: int | None = None, layout: str = "NHD",
        dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda",
    ) -> None:  # fmt: skip
        sizes = {
            "pages": pages, "heads": heads, "head_size": head_size, "sequences": sequences,
            "layers": layers, "page_size": page_size,
            "max_length": pages * page_size if max_length is None else max_length,
        }  # fmt: skip
        for name, size in sizes.items():
            if size <= 0:
                raise ValueError(f"PagedCache: {name} must be positive, got {size}")
        if layout not in LAYOUTS:
            raise ValueError(f"PagedCache: layout must be one of {LAYOUTS}, got {layout!r}")
        self.page_size, self.max_length = page_size, sizes["max_length"]
        self.layout = layout
        of_page = (page_size, heads) if layout == "NHD" else (heads, page_size)
        width = min(pages, self._pages_for(self.max_length))
        with torch.inference_mode(False):  # whose tensors cannot be written outside of it
            self._data = torch.zeros(
                (layers, 2, pages, *of_page, head_size), dtype=dtype, device=device
            )
            self.block_table = torch.zeros((sequences, width), dtype=torch.int32, device=device)
            self.seq_lens = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._pool = Pages(pages)
        self._pages: dict[int, list[int]] = {}  # of each sequence
        self._lengths: dict[int, int] = {}
        self._advanced: dict[int, torch.Tensor] = {}

    # ---------------------------------------------------------------- what there is

    @property
    def free_pages(self) -> int:
        """How many pages nobody has."""
        return self._pool.free

    @property
    def live(self) -> list[int]:
        """The sequences that there are, in ascending order."""
        return sorted(self._lengths)

    def length(self, sequence: int) -> int:
        """Return the tokens of a sequence. Raises ValueError if there is no such sequence."""
        return self._lengths[self._known("length", sequence)]

    def keys(self, layer: int = 0) -> torch.Tensor:
        """Return the keys of a layer, a view [pages, page_size, heads, head_size]."""
        return self._view(layer, 0)

    def values(self, layer: int = 0) -> torch.Tensor:
        """Return the values of a layer, a view [pages, page_size, heads, head_size]."""
        return self._view(layer, 1)

    def pages_needed(self, counts: Mapping[int, int]) -> int:
        """Return how many free pages `append(counts)` would take.

        Raises ValueError as `append` does.
        """
        return self._needed(self._counted(counts))

    def _needed(self, counts: Mapping[int, int]) -> int:
        owners, needed = dict[int, int](), 0
        for sequence, count in counts.items():
            length = self._lengths[sequence]
            if count < 0 or length + count > self.max_length:
                raise ValueError(
                    f"PagedCache.append: {count} tokens for sequence {sequence}, which has "
                    f"{length} of at most {self.max_length}"
                )
            pages = self._pages[sequence]
            needed += self._pages_for(length + count) - len(pages)
            if count and length % self.page_size:
                left = owners.get(pages[-1], self._pool.owners(pages[-1]))
                if left > 1:  # a copy, after which one owner less has the page
                    needed += 1
                    owners[pages[-1]] = left - 1
        return needed

    # ---------------------------------------------------------------- what changes

    def add(self) -> int:
        """Begin a sequence without tokens, and return its number: a row of the block table.

        Raises KVCacheFull if all rows are taken.
        """
        rows = self.seq_lens.shape[0]
        sequence = next((row for row in range(rows) if row not in self._lengths), None)
        if sequence is None:
            raise KVCacheFull(
                f"PagedCache: all {rows} sequences are in use: free one, or make the cache with "
                "more `sequences`"
            )
        self._pages[sequence], self._lengths[sequence] = [], 0
        return sequence

    def append(self, counts: Mapping[int, int]) -> torch.Tensor:
        """Make room for `counts[sequence]` more tokens of sequences, and return their slots.

        The slots, int64 on the device, are in the order of `counts`, those of a sequence in the
        order of its tokens: what `jitkern.ops.kv_cache_append` takes, for each layer. `seq_lens`
        counts the tokens from now on. A last page that others share is copied first.

        Raises KVCacheFull if too few pages are free, and ValueError for a sequence that there is
        not, a negative count, or more than `max_length` tokens. Nothing is changed then.
        """
        self._refuse_capture("append")
        slots = [slot for each in self._reserved(counts).values() for slot in each]
        return self._on_device(slots)

    def advance(self, tokens: int = 1, sequences: Iterable[int] | None = None) -> torch.Tensor:
        """Make room for as many more tokens of each sequence, all of them by default.

        Returns the slots in the order of rows: int64 [rows * tokens] on the device, with -1, which
        ops skip, in rows of other sequences. It is the same tensor at each call with as many
        tokens, overwritten: a CUDA graph of a decoding step may read it. Raises as `append` does.
        """
        self._refuse_capture("advance")
        rows, tokens = self.seq_lens.shape[0], operator.index(tokens)
        counts = dict.fromkeys(self.live if sequences is None else sequences, tokens)
        slots = [-1] * (rows * tokens)
        for sequence, own in self._reserved(counts).items():
            slots[sequence * tokens : (sequence + 1) * tokens] = own
        if tokens not in self._advanced:
            with torch.inference_mode(False):
                kept = torch.empty(len(slots), dtype=torch.int64, device=self.seq_lens.device)
            self._advanced[tokens] = kept
        return self._advanced[tokens].copy_(self._on_host(slots, torch.int64), non_blocking=True)

    def fork(self, sequence: int) -> int:
        """Begin a sequence with the tokens of another one, whose pages it shares.

        Returns its number. Raises KVCacheFull if all rows are taken, and ValueError if there is no
        such sequence.
        """
        self._refuse_capture("fork")
        sequence = self._known("fork", sequence)
        new = self.add()
        pages = self._pages[new] = list(self._pages[sequence])
        self._pool.share(pages)
        self._lengths[new] = self._lengths[sequence]
        self._publish([(new, i, page) for i, page in enumerate(pages)])
        return new

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of a sequence from `length` on, as when guesses were rejected.

        Raises ValueError if there is no such sequence, or if it is shorter.
        """
        self._refuse_capture("truncate")
        sequence, length = self._known("truncate", sequence), operator.index(length)
        before = self._lengths[sequence]
        if not 0 <= length <= before:
            raise ValueError(
                f"PagedCache.truncate: sequence {sequence} has {before} tokens, so it cannot be "
                f"cut to {length}"
            )
        kept = self._pages_for(length)
        self._pool.give_back(self._pages[sequence][kept:])
        del self._pages[sequence][kept:]
        self._lengths[sequence] = length
        self._publish()

    def free(self, sequence: int) -> None:
        """End a sequence: pages that nobody else has are free again.

        Raises ValueError if there is no such sequence.
        """
        self._refuse_capture("free")
        sequence = self._known("free", sequence)
        self._pool.give_back(self._pages.pop(sequence))
        del self._lengths[sequence]
        self._publish()

    # ---------------------------------------------------------------- how

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _counted(self, counts: Mapping[int, int]) -> dict[int, int]:
        return {self._known("append", s): operator.index(count) for s, count in counts.items()}

    def _known(self, method: str, sequence: int) -> int:
        """Return the number of a sequence as an int. Raises ValueError if there is none."""
        sequence = operator.index(sequence)
        if sequence not in self._lengths:
            raise ValueError(
                f"PagedCache.{method}: there is no sequence {sequence}; there are {self.live}"
            )
        return sequence

    def _refuse_capture(self, method: str) -> None:
        if is_capturing(self.seq_lens):
            raise RuntimeError(
                f"PagedCache.{method}: a CUDA graph is being captured, which would write the "
                f"lengths and pages of now at each replay: call {method} before the capture, and "
                "before a replay"
            )

    def _view(self, layer: int, which: int) -> torch.Tensor:
        data = self._data.detach()[layer, which]  # writing has no gradient
        return data if self.layout == "NHD" else data.transpose(1, 2)

    def _reserved(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Give pages to sequences for more tokens; return the slots of each sequence."""
        counts = self._counted(counts)  # what is kept of tensors must not change with them
        needed = self._needed(counts)
        if needed > self._pool.free:
            raise KVCacheFull(
                f"PagedCache.append: {sum(counts.values())} tokens need {needed} pages, and "
                f"{self._pool.free} of {self._pool.count} are free: free a sequence, or make the "
                "cache with more `pages`",
                needed=needed, free=self._pool.free,
            )  # fmt: skip
        entries, copies, slots = [], [], {}
        for sequence, count in counts.items():
            pages, length = self._pages[sequence], self._lengths[sequence]
            if count and length % self.page_size and self._pool.owners(pages[-1]) > 1:
                copies.append((pages[-1], self._pool.take()))
                self._pool.give_back(pages[-1:])
                pages[-1] = copies[-1][1]
                entries.append((sequence, len(pages) - 1, pages[-1]))
            while len(pages) < self._pages_for(length + count):
                pages.append(self._pool.take())
                entries.append((sequence, len(pages) - 1, pages[-1]))
            self._lengths[sequence] = length + count
            slots[sequence] = [
                pages[at // self.page_size] * self.page_size + at % self.page_size
                for at in range(length, length + count)
            ]
        if copies:
            old, new = self._on_device(copies).T
            # PyTorch does not index float8, and a copy does not ask what the bytes mean.
            data = self._data.view(torch.uint8) if self._data.itemsize == 1 else self._data
            data[:, :, new] = data[:, :, old]
        self._publish(entries)
        return slots

    def _publish(self, entries: Sequence[tuple[int, int, int]] = ()) -> None:
        """Write all lengths, and entries (row, column, page) of the table, on the device."""
        lengths = [self._lengths.get(row, 0) for row in range(self.seq_lens.shape[0])]
        self.seq_lens.copy_(self._on_host(lengths, torch.int32), non_blocking=True)
        if entries:
            row, column, page = self._on_device(entries).T
            self.block_table[row, column] = page.to(torch.int32)

    def _on_device(self, numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return numbers as int64 on the device, without waiting for it."""
        return self._on_host(numbers, torch.int64).to(self.seq_lens.device, non_blocking=True)

    def _on_host(
        self, numbers: Sequence[int] | Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return numbers in memory from which the device copies while the host goes on."""
        pinned = self.seq_lens.is_cuda and len(numbers) > 0
        return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether the current stream of a tensor's device captures a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
