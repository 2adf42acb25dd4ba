"""The memory of a group's device blocks as runs of addresses, computed from views without knowing their library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.abc import PageGroup


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Bytes that each device block has in one piece: block ``i`` has ``nbytes`` of them at ``base + i * stride``.

    In a row they are at ``offset``.
    """

    base: int
    stride: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the pages of one page group are: ``num_blocks`` device blocks, ``factor`` of which make an offloaded block.

    ``runs`` are in the order of the group's views; views whose pages follow one another, in memory and in a row of
    ``row_bytes``, share a run. Bytes of a row that are in no run belong to other ranks. A rank without a layer of the
    group has no runs.
    """

    runs: tuple[LayerRun, ...]
    row_bytes: int
    num_blocks: int
    factor: int = 1

    @property
    def device_block_bytes(self) -> int:
        """Bytes of one device block on this rank."""
        return sum(run.nbytes for run in self.runs)

    @property
    def is_compact(self) -> bool:
        """Whether the runs fill a row, so that it can be copied as a whole."""
        return self.device_block_bytes == self.row_bytes

    @property
    def needs_gather(self) -> bool:
        """Whether a device block must be gathered before it can be copied as a whole."""
        return len(self.runs) > 1 and self.is_compact


def page_table(group: PageGroup) -> PageTable:
    """Returns the addresses of the pages of ``group``, whose views are numpy arrays or torch tensors of bytes.

    Raises ValueError if the views have different numbers of device blocks, or if their pages do not have places of
    their own within a row.
    """
    counts = {len(view) for view in group.views}
    if len(counts) > 1:
        raise ValueError(
            f"the device views of a group have {[len(view) for view in group.views]} blocks; "
            "they must all have the same number"
        )
    if len(group.offsets) != len(group.views):
        raise ValueError(f"{len(group.offsets)} places are given for {len(group.views)} views")
    runs = _runs(group.views, group.offsets)
    end = 0
    for run in sorted(runs, key=lambda run: run.offset):
        if run.offset < end or run.offset + run.nbytes > group.row_bytes:
            raise ValueError(
                f"pages of {run.nbytes} bytes at {run.offset} do not fit into a row of {group.row_bytes} bytes, of "
                f"which other pages have the first {end}"
            )
        end = run.offset + run.nbytes
    return PageTable(runs, group.row_bytes, counts.pop() if counts else 0, group.factor)


def _runs(views: Sequence[Any], offsets: Sequence[int]) -> tuple[LayerRun, ...]:
    runs: list[LayerRun] = []
    for view, offset in zip(views, offsets, strict=True):
        base, stride, nbytes = _address(view), _stride(view), int(view.shape[1])
        last = runs[-1] if runs else None
        if last is not None and (base, stride, offset) == (
            last.base + last.nbytes,
            last.stride,
            last.offset + last.nbytes,
        ):
            runs[-1] = LayerRun(last.base, stride, last.nbytes + nbytes, last.offset)
        else:
            runs.append(LayerRun(base, stride, nbytes, offset))
    return tuple(runs)


def _address(view: Any) -> int:
    return int(view.data_ptr() if hasattr(view, "data_ptr") else view.ctypes.data)


def _stride(view: Any) -> int:
    """Returns the bytes from one row to the next; rows are bytes, so torch's strides count bytes too."""
    return int(view.stride(0) if hasattr(view, "data_ptr") else view.strides[0])
