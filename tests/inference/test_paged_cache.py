"""`PagedCache`: who owns which page, beside lists of tokens, and what the device is told."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import jitkern.ops
from jitkern.ops import KVCacheFull, PagedCache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def small(**keywords):
    sizes = {"pages": 6, "heads": 2, "head_size": 4, "sequences": 3, "page_size": 4}
    return PagedCache(**{"device": "cpu", "dtype": torch.float32, **sizes, **keywords})


def written(cache, slots, numbers):
    """Write a number into all keys of each slot, and its negative into the values."""
    for slot, number in zip(slots.tolist(), numbers, strict=True):
        at = divmod(slot, cache.page_size)
        cache.keys()[at] = number
        cache.values()[at] = -number


def read(cache, sequence):
    """The numbers of a sequence, read the way the ops read them: by the table on the device."""
    length = int(cache.seq_lens[sequence])
    table = cache.block_table[sequence].tolist()
    found = []
    for at in range(length):
        page, offset = table[at // cache.page_size], at % cache.page_size
        key, value = cache.keys()[page, offset], cache.values()[page, offset]
        assert torch.equal(key, -value) and (key == key.flatten()[0]).all()
        found.append(int(key.flatten()[0]))
    return found


class Schedule(RuleBasedStateMachine):
    """Random calls, beside a list of numbers for each sequence."""

    def __init__(self):
        super().__init__()
        self.cache = small(layout="HND")
        self.lists, self.next = {}, 1

    def numbers(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    def one_of(self, data):
        return data.draw(st.sampled_from(sorted(self.lists)))

    @rule()
    def add(self):
        if len(self.lists) == 3:
            with pytest.raises(KVCacheFull):
                self.cache.add()
        else:
            self.lists[self.cache.add()] = []

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def append(self, data):
        counts = data.draw(st.dictionaries(st.sampled_from(sorted(self.lists)), st.integers(0, 9)))
        needed = self.cache.pages_needed(counts) if self.fits(counts) else None
        before = self.cache.free_pages
        if needed is None:
            with pytest.raises(ValueError, match="of at most 24"):
                self.cache.append(counts)
        elif needed > before:
            with pytest.raises(KVCacheFull, match="pages, and"):
                self.cache.append(counts)
        else:
            new = self.numbers(sum(counts.values()))
            written(self.cache, self.cache.append(counts), new)
            assert self.cache.free_pages == before - needed
            for sequence, count in counts.items():
                self.lists[sequence] += new[:count]
                del new[:count]

    def fits(self, counts):
        return all(len(self.lists[s]) + n <= self.cache.max_length for s, n in counts.items())

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), tokens=st.integers(1, 2))
    def advance(self, data, tokens):
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.lists))))
        counts = dict.fromkeys(chosen, tokens)
        if self.fits(counts) and self.cache.pages_needed(counts) <= self.cache.free_pages:
            slots = self.cache.advance(tokens, chosen).view(3, tokens)
            for sequence in range(3):
                if sequence in chosen:
                    new = self.numbers(tokens)
                    written(self.cache, slots[sequence], new)
                    self.lists[sequence] += new
                else:
                    assert (slots[sequence] == -1).all()

    @precondition(lambda self: 0 < len(self.lists) < 3)
    @rule(data=st.data())
    def fork(self, data):
        sequence, free = self.one_of(data), self.cache.free_pages
        self.lists[self.cache.fork(sequence)] = list(self.lists[sequence])
        assert self.cache.free_pages == free

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.one_of(data)
        length = data.draw(st.integers(0, len(self.lists[sequence])))
        self.cache.truncate(sequence, length)
        del self.lists[sequence][length:]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.one_of(data)
        self.cache.free(sequence)
        del self.lists[sequence]

    @invariant()
    def every_sequence_has_its_own_numbers(self):
        assert self.cache.live == sorted(self.lists)
        for sequence in range(3):
            assert read(self.cache, sequence) == self.lists.get(sequence, [])
            if sequence in self.lists:
                assert self.cache.length(sequence) == len(self.lists[sequence])

    @invariant()
    def no_page_is_lost(self):
        owned = set()
        for sequence in self.cache.live:
            pages = -(-self.cache.length(sequence) // self.cache.page_size)
            owned.update(self.cache.block_table[sequence, :pages].tolist())
        assert owned <= set(range(6))
        assert self.cache.free_pages == 6 - len(owned)

    def teardown(self):
        for sequence in list(self.cache.live):
            self.cache.free(sequence)
        assert self.cache.free_pages == 6


TestSchedule = Schedule.TestCase
unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
TestSchedule.settings = settings(max_examples=40, stateful_step_count=25, **unhurried)


@pytest.mark.long
def test_a_thousand_schedules():
    from hypothesis.stateful import run_state_machine_as_test

    many = settings(max_examples=1000, stateful_step_count=50, **unhurried)
    run_state_machine_as_test(Schedule, settings=many)


@each_device
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_fork_copies_the_page_that_it_writes_to(device, layout, dtype):
    cache = small(device=device, layout=layout, dtype=dtype, layers=2)
    first = cache.add()
    cache.append({first: 6})
    kept = [of(layer).view(torch.uint8) for layer in range(2) for of in (cache.keys, cache.values)]
    for part in kept:
        part.copy_(torch.randint(0, 120, part.shape))
    before = [part.clone() for part in kept]
    fork = cache.fork(first)
    assert cache.free_pages == 4
    assert torch.equal(cache.block_table[first], cache.block_table[fork])
    (slot,) = cache.append({fork: 1}).tolist()
    assert cache.free_pages == 3
    table = cache.block_table.tolist()
    assert table[fork][0] == table[first][0] and table[fork][1] != table[first][1]
    assert slot == table[fork][1] * 4 + 2
    new, old = table[fork][1], table[first][1]
    others = [page for page in range(6) if page != new]
    for now, earlier in zip(kept, before):
        assert torch.equal(now[new], earlier[old]) and torch.equal(now[others], earlier[others])
    cache.append({first: 1})  # which has the page alone by now
    assert cache.free_pages == 3
    assert cache.seq_lens.tolist() == [7, 7, 0]


@each_device
def test_advance_returns_one_tensor_for_graphs(device):
    cache = small(device=device)
    a, b = cache.add(), cache.add()
    slots = cache.advance()
    assert slots.tolist() == [cache.block_table[0, 0] * 4, cache.block_table[1, 0] * 4, -1]
    assert cache.advance(sequences=[b]) is slots
    assert slots.tolist() == [-1, cache.block_table[1, 0] * 4 + 1, -1]
    assert cache.advance(3).view(3, 3)[a].tolist() == [
        cache.block_table[0, 0] * 4 + i for i in (1, 2, 3)
    ]
    assert cache.seq_lens.tolist() == [4, 5, 0]


@pytest.mark.long
@each_device
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_forks_decode_as_if_each_had_its_own_cache(device, layout):
    cache = small(head_size=64, page_size=16, layout=layout, device=device)
    g = torch.Generator().manual_seed(0)

    def tokens(count):
        return [torch.randn(count, 2, 64, generator=g).to(device) for _ in "kv"]

    def append(slots, k, v):
        jitkern.ops.kv_cache_append(k, v, cache.keys(), cache.values(), slots)

    first = cache.add()
    prompt = tokens(21)
    append(cache.append({first: 21}), *prompt)
    fork = cache.fork(first)
    own = {first: prompt, fork: prompt}
    for _ in range(13):  # past the end of the second page
        step = tokens(3)
        append(cache.advance(), *step)
        own = {s: [torch.cat([x, y[s : s + 1]]) for x, y in zip(o, step)] for s, o in own.items()}
    q = torch.randn(3, 2, 64, generator=g).to(device)
    out, lse = jitkern.ops.paged_decode(
        q, cache.keys(), cache.values(), cache.block_table, cache.seq_lens
    )
    for sequence, (k, v) in own.items():
        p = (torch.einsum("hd,thd->ht", q[sequence], k) / 8).softmax(-1)
        want = torch.einsum("ht,thd->hd", p, v)
        torch.testing.assert_close(out[sequence], want, rtol=1e-4, atol=1e-5)
    assert not out[2].any() and lse[2].isneginf().all()


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    from helpers import refusing_to_wait

    cache = small(device="cuda")
    with refusing_to_wait():
        first = cache.add()
        cache.append({first: 6})
        fork = cache.fork(first)
        cache.advance()
        cache.truncate(fork, 3)
        cache.free(first)
    assert cache.seq_lens.tolist() == [0, 3, 0]


def changes(cache):
    """Calls that change the sequence 0."""
    return {
        "append": lambda: cache.append({0: 1}), "advance": cache.advance,
        "fork": lambda: cache.fork(0), "truncate": lambda: cache.truncate(0, 1),
        "free": lambda: cache.free(0),
    }  # fmt: skip


def test_no_sequence_changes_in_a_capture(monkeypatch):
    cache = small()
    cache.append({cache.add(): 3})
    monkeypatch.setattr("jitkern.kernels_src.paged_decode.paged_cache.is_capturing", lambda _: True)
    for name, change in changes(cache).items():
        with pytest.raises(RuntimeError, match=f"{name}: a CUDA graph is being captured"):
            change()
    assert (cache.live, cache.length(0), cache.free_pages) == ([0], 3, 5)


@pytest.mark.gpu
def test_a_graph_reads_the_tensors_of_now():
    cache = small(device="cuda", page_size=16, head_size=64)
    cache.append({cache.add(): 3})
    slots, graph = cache.advance(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [t.clone() for t in (slots, cache.seq_lens, cache.block_table)]
        for name, change in changes(cache).items():
            with pytest.raises(RuntimeError, match=f"{name}: a CUDA graph"):
                change()
    for _ in range(20):  # over the end of a page
        assert cache.advance() is slots
        graph.replay()
        now = slots, cache.seq_lens, cache.block_table
        assert all(map(torch.equal, got, now))
    assert cache.seq_lens.tolist() == [24, 0, 0]


@each_device
def test_default_device_and_inference_mode_change_nothing(device):
    with torch.inference_mode():
        cache = small(device=device)
        first = cache.add()
        cache.advance()
    slots = cache.advance()
    assert slots.tolist() == [cache.block_table[0, 0] * 4 + 1, -1, -1]
    with torch.device("meta"):
        assert cache.append({first: 3}).device.type == device
    assert cache.seq_lens.tolist() == [5, 0, 0]


@pytest.mark.long
def test_a_gradient_of_what_is_written_does_not_reach_the_cache():
    cache = small()
    key = torch.ones(1, 2, 4, requires_grad=True)
    views = cache.keys(), cache.values()
    jitkern.ops.kv_cache_append(2 * key, 3 * key, *views, cache.append({cache.add(): 1}))
    assert (cache.keys()[views[0][:, :, 0, 0] != 0] == 2).all()
    assert not cache.keys().requires_grad and not copy.deepcopy(cache).values().requires_grad


def test_layouts_have_views_of_one_shape():
    for layout in ("NHD", "HND"):
        cache = small(layout=layout, layers=3)
        assert cache.keys(2).shape == cache.values(2).shape == (6, 4, 2, 4)
    assert not cache.keys().is_contiguous() and cache.keys().transpose(1, 2).is_contiguous()


def test_the_table_is_as_wide_as_the_longest_sequence():
    assert small(max_length=9).block_table.shape == (3, 3)
    assert small(max_length=1000).block_table.shape == (3, 6)


def test_errors_change_nothing_and_say_what_there_is():
    cache = small()
    first = cache.add()
    cache.append({first: 20})
    for match, call in {
        "there is no sequence 1; there are \\[0\\]": lambda: cache.append({first: 1, 1: 1}),
        "fork: there is no sequence 2": lambda: cache.fork(2),
        "free: there is no sequence 2": lambda: cache.free(2),
        "length: there is no": lambda: cache.length(2),
        "-1 tokens for sequence 0": lambda: cache.append({first: -1}),
        "5 tokens for sequence 0, which has 20 of at most 24": lambda: cache.append({first: 5}),
        "has 20 tokens, so it cannot be cut to 21": lambda: cache.truncate(first, 21),
        "pages must be positive, got 0": lambda: small(pages=0),
        "page_size must be positive, got -1": lambda: small(page_size=-1),
        "max_length must be positive, got 0": lambda: small(max_length=0),
        "layout must be one of": lambda: small(layout="DHN"),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    second = cache.add()
    with pytest.raises(KVCacheFull, match="5 tokens need 2 pages, and 1 of 6 are free") as caught:
        cache.append({second: 5})
    assert (caught.value.needed, caught.value.free) == (2, 1)
    cache.add()
    with pytest.raises(KVCacheFull, match="all 3 sequences are in use"):
        cache.add()
    assert cache.seq_lens.tolist() == [20, 0, 0] and cache.free_pages == 1


def test_numbers_may_be_elements_of_tensors():
    """The cache keeps none of these elements, which change later."""
    cache = small()
    kept, tokens = torch.tensor([5, 6]), torch.tensor(1)
    first = cache.add()
    cache.append({torch.tensor(first): kept[1]})
    cache.truncate(torch.tensor(first), kept[0])
    slots = cache.advance(tokens)
    assert cache.advance(torch.tensor(1)) is slots
    kept += 100
    tokens += 100
    assert cache.length(first) == 7 and type(cache.length(first)) is int
    assert cache.append({first: 1}).tolist() == [7]
    before = cache.free_pages, cache.seq_lens.tolist()
    for call in (
        lambda: cache.append({first: 1.5}), lambda: cache.append({first: 2.0}),
        lambda: cache.truncate(first, 3.0), lambda: cache.advance(1.0),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            call()
    assert (cache.free_pages, cache.seq_lens.tolist()) == before and cache.length(first) == 8
