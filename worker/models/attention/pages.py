"""Pages of the KV cache: which layers share a block when some layers attend within a window (decision 0097).

A page has a number of *places*. Each place holds the keys and values of ``block_size`` tokens of one layer. A page is
assigned to a *group*: as many layers of one kind (layers that attend to everything, or layers of one window) as a page
has places. So a page serves any group, and a page that one group returns can be used by another. The caches of a place
are one tensor, which one layer of each group uses: every layer finds its own tokens in it by the block table of its
group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .caches import zeros
from .call import AttentionCall
from .page_layout import PageLayout

# More groups are more tables for each request. So the widest page is taken whose requests take little more room than
# those of the best: those that are so many times as long as the largest window, or as long as they may be.
_MOST_GROUPS = 32
_TOLERATED_PADDING = 1.05
_NUM_WINDOWS = 8
# Of the room that a request takes in one table; where groups save less they are not worth their tables.
_WORTH_WHILE = 0.9


@runtime_checkable
class PagedByGroups(Protocol):
    """A ``Forward`` that can have its caches in pages."""

    @property
    def attention_calls(self) -> list[AttentionCall]: ...

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """As ``Forward.allocate``, but for steps whose batch has the tables of each group."""
        ...


def plan_pages(calls: Sequence[AttentionCall], max_model_len: int, block_size: int) -> PageLayout | None:
    """Return how pages are laid out for the layers ``calls``; None where one table of all layers is as good."""
    storing = [call for call in calls if call.source is None]
    kinds = Counter(_window_of(call, max_model_len) for call in storing)
    if set(kinds) == {None}:
        return None

    def room(num_places: int, num_tokens: int) -> int:
        """Tokens of a layer that a request of ``num_tokens`` takes."""
        return sum(
            -(-count // num_places) * num_places * min(num_tokens, (window or num_tokens) + block_size)
            for window, count in kinds.items()
        )

    def num_groups(num_places: int) -> int:
        return sum(-(-count // num_places) for count in kinds.values())

    sizes = [size for size in range(1, max(kinds.values()) + 1) if num_groups(size) <= _MOST_GROUPS]
    usual = min(max_model_len, _NUM_WINDOWS * max(window or 0 for window in kinds))
    least = min(room(size, usual) for size in sizes)
    num_places = max(size for size in sizes if room(size, usual) <= _TOLERATED_PADDING * least)
    if room(num_places, max_model_len) > _WORTH_WHILE * len(storing) * max_model_len:
        return None
    layout = _lay_out([_window_of(call, max_model_len) for call in storing], num_places)
    # Who stores nothing is where it reads.
    index_of = {id(call): index for index, call in enumerate(storing)}
    at = [index_of[id(call.source or call)] for call in calls]
    return replace(layout, groups=tuple(layout.groups[i] for i in at), places=tuple(layout.places[i] for i in at))


def shapes_differ(calls: Sequence[AttentionCall]) -> bool:
    """Whether a token takes more room in some layers than in others, so that they cannot share pages."""
    return len({(call.key_shape, call.value_shape, call.cache_format.dtype) for call in calls}) > 1


def use_pages(calls: Sequence[AttentionCall], layout: PageLayout | None) -> None:
    """Have each attention look at the table of its group from now on; None for one table of all."""
    for index, call in enumerate(calls):
        call.group = 0 if layout is None else layout.groups[index]


def allocate_pages(
    calls: Sequence[AttentionCall], layout: PageLayout, num_pages: int, block_size: int, device: torch.device
) -> None:
    """Make the caches of all ``calls``: of a place one, for a layer of each group."""
    use_pages(calls, layout)
    shape = calls[0].key_shape, calls[0].value_shape
    dtype = calls[0].cache_format.dtype
    of_places: list[tuple[Tensor, Tensor]] = []
    for call in calls:
        call.key_cache = call.value_cache = None  # first let go of what was
    for _ in range(layout.num_places):
        keys, values = (zeros((num_pages, block_size, *of), dtype, device) for of in shape)
        of_places.append((keys, values))
    for call, place in zip(calls, layout.places, strict=True):
        call.key_cache, call.value_cache = of_places[place]


def _window_of(call: AttentionCall, max_model_len: int) -> int | None:
    """None where it sees all, or has a rule that may look anywhere."""
    is_narrow = call.window is not None and call.window < max_model_len and not call.has_own_rule
    return call.window if is_narrow else None


def _lay_out(windows: Sequence[int | None], num_places: int) -> PageLayout:
    """Fill one group after the other; the last of each kind may have fewer layers than places."""
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    of_groups: list[int | None] = []
    groups, places = [0] * len(windows), [0] * len(windows)
    for kind in kinds:
        layers = [index for index, window in enumerate(windows) if window == kind]
        for number, index in enumerate(layers):
            if number % num_places == 0:
                of_groups.append(kind)
            groups[index], places[index] = len(of_groups) - 1, number % num_places
    return PageLayout(tuple(of_groups), num_places, tuple(groups), tuple(places))
