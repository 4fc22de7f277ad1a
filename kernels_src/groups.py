"""How the kernels of include/largest.cuh divide a row into groups, and keep the largest of each."""

from jitkern.kernels_src.elements import blocks

THREADS = 256  # of a block of the launch that finds them: a group for each
SEARCH_THREADS = 1024  # of a block of the launch that searches among them
MOST = 8192  # groups of a row that shared memory holds


def grouping(columns, size, wanted):
    """Return log2 of the vectors of a group, and the blocks of a row that find the best of groups.

    size: bytes of an element. wanted: elements to find: there should be twice as many groups, of up
    to four vectors of 16 bytes.
    """
    each = 16 // size
    vectors = (columns + 2 * each - 2) // each
    shift = 2
    while shift and vectors >> shift < 2 * wanted:
        shift -= 1
    while vectors > MOST << shift:
        shift += 1
    chunk = THREADS << shift
    return shift, blocks(vectors, chunk)
