"""Pages of memory that have several owners: a free list and a count for each page."""

from __future__ import annotations


class Pages:
    """So many pages, numbered from 0, each with a number of owners; those with none are free."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]  # the last one is taken first
        self._owners = [0] * count

    @property
    def free(self) -> int:
        """How many pages have no owner."""
        return len(self._free)

    @property
    def count(self) -> int:
        """How many pages there are."""
        return len(self._owners)

    def owners(self, page: int) -> int:
        """Return how many owners a page has."""
        return self._owners[page]

    def take(self) -> int:
        """Return a page that was free and has one owner now. Raises IndexError if none is free."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, pages: list[int]) -> None:
        """Give each of the pages, which are not free, one owner more."""
        for page in pages:
            self._owners[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Give each of the pages one owner less, which frees those that have no other."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
