"""The CUDA side of a rank: where its device is, and a transfer whose host slots are registered with the driver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from kvoffload.abc import ByteArray, PageGroup, Transfer
from kvoffload.host.pool import HostPool
from kvoffload.host.registration import Registration
from kvoffload.host.touch import Toucher
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.driver import Driver
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.cuda.slots import Unregistered
from kvoffload.transfer.cuda.transfer import CudaTransfer

logger = logging.getLogger(__name__)


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
    # Engines without a GPU may lack it.
    import torch

    device = next(view for group in groups for view in group.views).device
    number = device.index or 0
    tables = [page_table(group) for group in groups]
    cuda = CudaDevice(tables, number, lambda: int(torch.cuda.current_stream(device).cuda_stream))
    driver = Driver(number)
    logger.info("kvoffload: blocks are copied with CUDA %s%s", driver.version, "" if cuda.batches else ", one by one")
    if not driver.copies_registered_memory:
        logger.warning(
            "kvoffload: this device cannot copy registered host memory (as under WSL2), so copies go through a small "
            "buffer and are slower"
        )
        return CudaTransfer(tables, slots, cuda, Unregistered())
    wait = Toucher(slots, collapse=False).wait if pool is None else pool.wait_until_touched
    registration = Registration(slots, driver, wait)
    if pool is not None:
        pool.before_close(registration.close)
    return CudaTransfer(tables, slots, cuda, registration)
