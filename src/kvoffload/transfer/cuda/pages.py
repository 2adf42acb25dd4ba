"""The memory of a group's device blocks as runs of addresses, computed from views without knowing their library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.abc import PageGroup


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that each device block has in one piece: block ``i`` has ``nbytes`` of them at ``base + i * stride``.

    In a row that holds a whole device block they are at ``offset``.
    """

    base: int
    stride: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the pages of one page group are: ``num_blocks`` device blocks, ``factor`` of which make an offloaded block.

    ``runs`` are in the order of the group's views; views whose pages follow one another in memory share a run. A rank
    without a layer of the group has no runs.
    """

    runs: tuple[Run, ...]
    num_blocks: int
    factor: int = 1

    @property
    def device_block_bytes(self) -> int:
        return sum(run.nbytes for run in self.runs)

    @property
    def is_direct(self) -> bool:
        """Whether a device block is one piece of memory, which can be copied without being gathered."""
        return len(self.runs) == 1


def page_table(group: PageGroup) -> PageTable:
    """Returns the addresses of the pages of ``group``, whose views are numpy arrays or torch tensors of bytes.

    Raises ValueError if the views have different numbers of device blocks.
    """
    counts = {len(view) for view in group.views}
    if len(counts) > 1:
        raise ValueError(
            f"the device views of a group have {[len(view) for view in group.views]} blocks; "
            "they must all have the same number"
        )
    return PageTable(_runs(group.views), counts.pop() if counts else 0, group.factor)


def _runs(views: Sequence[Any]) -> tuple[Run, ...]:
    runs: list[Run] = []
    offset = 0
    for view in views:
        base, stride, nbytes = _address(view), _stride(view), int(view.shape[1])
        last = runs[-1] if runs else None
        if last is not None and (base, stride) == (last.base + last.nbytes, last.stride):
            runs[-1] = Run(last.base, stride, last.nbytes + nbytes, last.offset)
        else:
            runs.append(Run(base, stride, nbytes, offset))
        offset += nbytes
    return tuple(runs)


def _address(view: Any) -> int:
    return int(view.data_ptr() if hasattr(view, "data_ptr") else view.ctypes.data)


def _stride(view: Any) -> int:
    """Returns the bytes from one row to the next; rows are bytes, so torch's strides count bytes too."""
    return int(view.stride(0) if hasattr(view, "data_ptr") else view.strides[0])
