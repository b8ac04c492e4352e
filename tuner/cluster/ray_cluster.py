"""A Ray cluster as a place that has GPUs: how to reach it, what Ray calls a GPU model, and how many of it are free.

The only file that imports ray, when a run asks for it.
"""

from __future__ import annotations

import importlib
import logging
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import InvalidInput, InvalidType, MissingDependency, NoGpu
from flashtune.settings import may_hold_password
from flashtune.values import shown

INSTALL_RAY = 'pip install "flashtune[ray]"'
CONNECT_SECONDS = 5.0
"""For a machine to answer at all. Ray itself tries a wrong address for minutes."""
SETTLE_SECONDS, SETTLE_LOOK_SECONDS = 4.0, 0.2
"""For GPUs that a run gave back a moment ago to be free for Ray too, and how often that is looked at."""

ACCELERATORS: dict[str, str] = {
    "t4": "T4",
    "a10": "A10",
    "a30": "A30",
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100",
    "a100-pcie-40gb": "A100",
    "a100-pcie-80gb": "A100",
    "a800-sxm-80gb": "A800",
    "a800-pcie-80gb": "A800",
    "rtx-3090": "GeForce-RTX-3090",
    "rtx-a6000": "RTX-A6000",
    "rtx-4090": "GeForce-RTX-4090",
    "rtx-6000-ada": "RTX-6000",
    "l4": "L4",
    "l40s": "L40S",
    "h20": "H20",
    "h100-sxm": "H100",
    "h100-pcie": "H100",
    "h100-nvl": "H100",
    "h800-sxm": "H800",
    "h800-pcie": "H800",
    "h200": "H200",
    "gh200-96gb": "GH200",
    "gh200-144gb": "GH200",
    "b200": "B200",
    "gb200": "GB200",
    "b300": "B300",
    "gb300": "GB300",
    "rtx-5090": "GeForce-RTX-5090",
    "rtx-pro-6000": "RTX-PRO-6000",
    "rtx-pro-6000-max-q": "RTX-PRO-6000",
    "rtx-pro-6000-server": "RTX-PRO-6000",
}
"""What Ray calls a GPU of our table: its own names (`ray.util.accelerators`), and what it derives where it has none.
Ray tells fewer models apart, so each worker looks at what it was given."""

_ADDRESS = re.compile(r"auto|[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", re.ASCII)


def asked_of_ray(gpu: Gpu | str | None, mode: str, devices: Sequence[int] | None, address: object) -> Gpu:
    """The GPU that a run on a cluster is for; raises for a request that makes no sense. Needs no ray."""
    if not isinstance(address, str):
        raise InvalidType(f"ray={shown(address)} must be text: 'auto', or the address of a cluster")
    if not _ADDRESS.fullmatch(address):
        given = "ray" if may_hold_password(address) else f"ray={shown(address)}"
        raise InvalidInput(
            f"{given} must be auto, for the cluster that this machine is part of, or HOST:PORT of its head"
        )
    if devices is not None:
        raise InvalidInput("devices are those of this machine, and with ray it is Ray that says where to measure")
    if mode == "predict":
        raise InvalidInput("mode predict measures nothing, so there is nothing to ask Ray for")
    if gpu is None:
        raise InvalidInput("name the GPU model to ask Ray for, such as h100")
    if not isinstance(gpu, Gpu | str):
        raise InvalidType(f"gpu is a {type(gpu).__qualname__}, it must be a Gpu or an alias such as 'h100'")
    target = gpu_by_alias(gpu) if isinstance(gpu, str) else gpu
    if target.mig or target.name not in ACCELERATORS:
        raise InvalidInput(f"{target.key} has no name in Ray. It knows: {', '.join(ACCELERATORS)}")
    return target


def import_ray() -> Any:
    """The module; :class:`MissingDependency` says how to get it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependency(f"A Ray cluster needs ray, which can't be imported ({error}): {INSTALL_RAY}") from error


def connect(ray: Any, address: str) -> bool:
    """Connects this process to the cluster at ``address``; False if it is connected already, and that is used.

    Raises :class:`NoGpu` where there is no such cluster.
    """
    if ray.is_initialized():
        return False
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise NoGpu(f"nothing answers at {address} ({error}): is it the address of a Ray head?") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise NoGpu(
                "this machine is part of no Ray cluster that runs (or of several). `ray start --head` starts one, "
                "`ray start --address=HOST:PORT` joins one, and RAY_ADDRESS or --ray HOST:PORT names one"
            ) from error
        raise NoGpu(f"no connection to the Ray cluster at {address}: {' '.join(str(error).split())}") from error
    return True


def free_gpus(ray: Any, gpu: Gpu, wanted: int) -> int:
    """How many GPUs that Ray calls by the name of ``gpu`` it can give, up to ``wanted``. :class:`NoGpu` for none."""
    label = ACCELERATORS[gpu.name]
    nodes = live_nodes(ray)
    here = sum(count for labels, count, _ in nodes if label in labels)
    deadline = time.monotonic() + SETTLE_SECONDS
    while (free := int(ray.available_resources().get("GPU", 0))) < min(here, wanted) and time.monotonic() < deadline:
        time.sleep(SETTLE_LOOK_SECONDS)
    free = min(free, here, wanted)
    if free < 1:
        listed = ", ".join(f"{count} {'/'.join(labels) or 'of no known type'}" for labels, count, _ in nodes if count)
        state = f"none of its {here} {label} is free" if here else f"it has no {label}"
        raise NoGpu(f"the Ray cluster offers no {gpu}: {state}. Its GPUs, by node: {listed or 'none'}")
    return free


def live_nodes(ray: Any) -> list[tuple[list[str], int, str]]:
    """Of each node: what Ray calls its accelerators, how many GPUs it has in all, and its address."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            prefix = "accelerator_type:"
            labels = sorted(each.removeprefix(prefix) for each in resources if each.startswith(prefix))
            found.append((labels, int(resources.get("GPU", 0)), node["NodeManagerAddress"]))
    return found
