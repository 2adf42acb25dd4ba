"""The CUDA side of a rank: where its device is, and a transfer whose host slots are registered with the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvoffload.abc import ByteArray, PageGroup, Transfer
from kvoffload.host.pool import HostPool
from kvoffload.host.registration import Registration
from kvoffload.host.touch import Toucher
from kvoffload.transfer.cuda.driver import Driver


def numa_node(groups: Sequence[PageGroup]) -> int | None:
    """Returns the NUMA node next to the device that holds the pages of ``groups``; None on a CPU, or if it is not
    known."""
    devices = {view.device for group in groups for view in group.views if view.device.type == "cuda"}
    # What is not known costs speed only: the engine starts without it.
    with contextlib.suppress(RuntimeError):
        for device in devices:
            return Driver(device.index or 0).numa_node()
    return None


def make_cuda_transfer(groups: Sequence[PageGroup], slots: ByteArray, pool: HostPool | None) -> Transfer:
    """Returns the transfer between the pages of ``groups`` and ``slots``, which are registered in the background.

    ``slots`` are the data of ``pool``, which unregisters them when it is closed, or, if ``pool`` is None, those of
    another process's pool, which remain registered until this process ends.
    """
    # Engines without a GPU lack what these import.
    from kvoffload.transfer.cuda.pages import page_table
    from kvoffload.transfer.cuda.torch_device import TorchDevice
    from kvoffload.transfer.cuda.transfer import CudaTransfer

    device = TorchDevice(groups)
    number = next(view for group in groups for view in group.views).device.index or 0
    wait = Toucher(slots, collapse=False).wait if pool is None else pool.wait_until_touched
    registration = Registration(slots, Driver(number), wait)
    if pool is not None:
        pool.before_close(registration.close)
    return CudaTransfer([page_table(group) for group in groups], slots, device, registration)
