"""Which sequences go together: shares of equal cost for data-parallel ranks, micro-batches under a token cap.

Pure functions of lengths and costs. Equal input gives equal output on every rank: ties are decided by index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from mindspeed_rl.config.model import ModelConfig

_PAIRS_PER_COST = 8  # how many pairs of parts exchanges look at in all: as many as mini-batches need, and linear


def sequence_costs(lengths: Sequence[int], model: ModelConfig) -> list[int]:
    """Relative cost of computing each sequence: its forward FLOPs, linear and quadratic in its length.

    Backward and recomputation multiply all of them by the same factor. Integers, so that sums are exact and ties
    do not depend on the order of summation.

    Args:
        lengths: [B] tokens of each sequence, prompt and response.
        model: shape of the model.
    """
    return model.forward_flops(lengths)


def balanced_partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide indices into `parts` lists of equal length (± 1) so that the largest sum of costs is small.

    First the differencing method (Karmarkar & Karp, "The differencing method of set partitioning", UCB/CSD 82/113,
    1982) with equal cardinalities (Michiels, Korst, Aarts & van Leeuwen, STACS 2003, who prove that the largest sum
    is at most 2 - 1/parts times the least possible). By decreasing cost, every `parts` neighbours are dealt out, one
    to each part of a partial solution; the two partial solutions with the largest spread of sums are joined, the
    largest part of one with the smallest of the other, and so on until one is left. Then exchanges: with a few very
    long sequences, equal cardinality leaves the method a gap of several percent, which swaps nearly close.

    Equal costs go by ascending index, equal spreads by age of the partial solution. O(n log n) steps for n costs.

    Returns:
        `parts` lists of ascending indices, longer lists first, then by first index; empty where there are fewer costs
        than parts.

    Raises:
        ValueError: parts is less than 1.
    """
    if parts < 1:
        raise ValueError(f"parts = {parts}: expected at least 1")
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    # a partial solution: -spread, age, its (sum, members) by decreasing sum. Of a tuple the age is unique
    solutions: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), parts):
        dealt: list[tuple[float, list[int]]] = [(costs[index], [index]) for index in order[start : start + parts]]
        dealt += [(0, []) for _ in range(parts - len(dealt))]  # in the last one only: lengths differ by one at most
        solutions.append((dealt[-1][0] - dealt[0][0], len(solutions), dealt))
    heapq.heapify(solutions)
    for age in range(len(solutions), 2 * len(solutions) - 1):
        _, _, first = heapq.heappop(solutions)
        _, _, second = heapq.heappop(solutions)
        pairs = zip(first, reversed(second), strict=True)
        joined = [(a + b, _union(mine, theirs)) for (a, mine), (b, theirs) in pairs]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(solutions, (joined[-1][0] - joined[0][0], age, joined))
    members = [part for _, part in solutions[0][2]] if solutions else [[] for _ in range(parts)]
    _exchange(costs, members)
    return sorted((sorted(part) for part in members), key=lambda part: (-len(part), part))


def _union(first: list[int], second: list[int]) -> list[int]:
    """Both lists' members; the longer one is extended in place, which keeps all unions together at O(n log n)."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    longer.extend(shorter)
    return longer


def _exchange(costs: Sequence[float], members: list[list[int]]) -> None:
    """Swap two indices between the costliest part and the cheapest part that gains by it, until none does."""
    for part in members:
        part.sort(key=lambda index: (costs[index], index))
    ranking = sorted((sum(costs[index] for index in part), number) for number, part in enumerate(members))
    left = _PAIRS_PER_COST * len(costs)
    while left > 0:
        high, costliest = ranking[-1]
        for low, cheaper in ranking[:-1]:
            left -= 1
            swap = _best_swap(costs, members[costliest], members[cheaper], high - low)
            if swap is not None:
                break
        else:
            return
        saved = costs[swap[0]] - costs[swap[1]]
        for number, old, new in ((costliest, *swap), (cheaper, *reversed(swap))):
            members[number].remove(old)
            insort(members[number], new, key=lambda index: (costs[index], index))
        ranking.remove((high, costliest))
        ranking.remove((low, cheaper))
        insort(ranking, (high - saved, costliest))
        insort(ranking, (low + saved, cheaper))


def _best_swap(costs: Sequence[float], high: list[int], low: list[int], gap: float) -> tuple[int, int] | None:
    """The index of `high` and that of `low` whose exchange brings two sums, `gap` apart, closest together."""
    best: tuple[float, int, int] | None = None
    ascending = [costs[index] for index in low]
    for mine in high:
        place = bisect_left(ascending, costs[mine] - gap / 2)
        for theirs in low[max(place - 1, 0) : place + 1]:
            saved = costs[mine] - costs[theirs]
            if 0 < saved < gap:
                candidate = (abs(saved - gap / 2), mine, theirs)
                best = min(best, candidate) if best else candidate
    return best[1:] if best else None


def imbalance(costs: Sequence[float], parts: Sequence[Sequence[int]]) -> float:
    """Largest part's sum of costs over the mean of all parts: 1 is perfect, and how much longer the slowest takes.

    Raises:
        ValueError: there are no parts, or their costs sum up to 0.
    """
    sums = [sum(costs[index] for index in part) for part in parts]
    if not sum(sums) > 0:
        raise ValueError(f"{len(sums)} parts cost {sum(sums)} together: expected parts, and more than 0")
    return max(sums) * len(sums) / sum(sums)


def fixed_micro_batches(sequences: int, size: int) -> list[list[int]]:
    """Indices below `sequences` in order, `size` at a time; the last micro-batch may be smaller."""
    return [list(range(start, min(start + size, sequences))) for start in range(0, sequences, size)]


def micro_batches(lengths: Sequence[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Divide sequences into few micro-batches of at most `max_tokens` tokens each, all about equally long.

    Their least number is found by best fit in order of decreasing length (at most 11/9 of the optimum and a constant:
    Johnson et al., SIAM J. Comput. 3, 1974). The sequences are then dealt out anew over that number, or
    `at_least`, longest first and each to the shortest micro-batch (Graham, SIAM J. Appl. Math. 17, 1969); where that
    breaks the cap, the best fit stays, divided further as far as `at_least` asks for it.

    Args:
        lengths: [B] tokens of each sequence, more than 0.
        max_tokens: cap on the sum of a micro-batch's lengths; never exceeded.
        at_least: make so many micro-batches if fewer would do: ranks that must take the same number of passes ask
            for the largest number among them. The result has max(at_least, the number without it) micro-batches.

    Returns:
        Non-empty lists of ascending indices that hold every sequence once; most tokens first, so that the first pass
        claims all the memory that later ones need.

    Raises:
        ValueError: a sequence is longer than `max_tokens` or empty, or there are fewer sequences than `at_least`.
    """
    for index, length in enumerate(lengths):
        if not 0 < length <= max_tokens:
            raise ValueError(f"sequence {index} has {length} tokens: expected 1 to max_tokens = {max_tokens}")
    if at_least > len(lengths):
        raise ValueError(f"at_least = {at_least} micro-batches of only {len(lengths)} sequences: one would be empty")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins = _best_fit(lengths, order, max_tokens)
    count = max(len(bins), at_least)
    level = _shortest_first(lengths, order, count)
    if max((_tokens(lengths, part) for part in level), default=0) <= max_tokens:
        bins = level
    while len(bins) < count:
        longest = max(bins, key=len)
        bins.append(longest[1::2])
        longest[1::2] = []
    return sorted((sorted(part) for part in bins), key=lambda part: (-_tokens(lengths, part), part))


def _tokens(lengths: Sequence[int], part: Sequence[int]) -> int:
    return sum(lengths[index] for index in part)


def _best_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each sequence goes where it leaves the least room, or into a new bin."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in order:
        place = bisect_left(rooms, (lengths[index], 0))
        if place == len(rooms):
            bins.append([])
            room, chosen = max_tokens, len(bins) - 1
        else:
            room, chosen = rooms.pop(place)
        bins[chosen].append(index)
        insort(rooms, (room - lengths[index], chosen))
    return bins


def _shortest_first(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """Each sequence goes to the bin with the fewest tokens."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]  # a heap
    for index in order:
        load, chosen = loads[0]
        bins[chosen].append(index)
        heapq.heapreplace(loads, (load + lengths[index], chosen))
    return bins
