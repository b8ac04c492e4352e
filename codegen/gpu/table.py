"""The GPUs that can be named without one being present, and how the driver reports each.

Sources: SMs, memory, bandwidth, clock and tensor rate are those of the vendor document in ``source``. The L2 size is
what the CUDA device attribute gives on such a card, which is not always what the document says. Shared memory follows
from the compute capability. Tensor rates are dense and with float32 accumulation, where the documents of data-centre
cards often state twice as much, with sparsity.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from flashtune.errors import UnknownGpu

from .gpu import CAPABILITIES, Gpu

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A GPU, the names by which drivers report it (``NVIDIA`` in front left out), and where its figures are from."""

    gpu: Gpu
    reported: tuple[str, ...]
    source: str


def _row(
    name: str,
    *reported: str,
    cc: tuple[int, int],
    sms: int,
    l2: int,
    gb: int,
    bandwidth: float,
    clock: int,
    tflops: float,
    source: str,
) -> GpuRow:
    gpu = Gpu(
        name=name,
        capability=cc,
        num_sms=sms,
        shared_memory_block=CAPABILITIES[cc].shared_memory_block,
        l2_bytes=l2,
        memory_gb=gb,
        bandwidth_gb_s=bandwidth,
        clock_mhz=clock,
        tensor_tflops=tflops,
    )
    return GpuRow(gpu, reported, source)


TURING, GA100, GA102, ADA = (7, 5), (8, 0), (8, 6), (8, 9)
HOPPER, BLACKWELL, BLACKWELL_ULTRA, BLACKWELL_RTX = (9, 0), (10, 0), (10, 3), (12, 0)
A100_DOC = "NVIDIA A100 Tensor Core GPU datasheet; Ampere architecture whitepaper"
A800_DOC = "NVIDIA A800 datasheet: an A100 with a slower NVLink"
GA102_DOC = "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"
ADA_DOC = "NVIDIA Ada GPU architecture whitepaper, appendix A"
H100_DOC = "NVIDIA H100 Tensor Core GPU datasheet; Hopper architecture whitepaper"
H800_DOC = "NVIDIA H800 datasheet: an H100 with a slower NVLink"
RTX_BLACKWELL_DOC = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"
RTX_PRO_DOC = "NVIDIA RTX PRO 6000 Blackwell datasheet; RTX Blackwell PRO GPU architecture whitepaper"

# fmt: off
ROWS: tuple[GpuRow, ...] = (
    _row("t4", "Tesla T4", "T4",
         cc=TURING, sms=40, l2=4 * MIB, gb=16, bandwidth=320, clock=1590, tflops=65,
         source="NVIDIA T4 datasheet; Turing architecture whitepaper"),
    _row("a10", "A10",
         cc=GA102, sms=72, l2=6 * MIB, gb=24, bandwidth=600, clock=1695, tflops=125,
         source="NVIDIA A10 datasheet and product brief"),
    _row("a30", "A30",
         cc=GA100, sms=56, l2=24 * MIB, gb=24, bandwidth=933, clock=1440, tflops=165,
         source="NVIDIA A30 datasheet and product brief"),
    _row("a100-sxm-40gb", "A100-SXM4-40GB",
         cc=GA100, sms=108, l2=40 * MIB, gb=40, bandwidth=1555, clock=1410, tflops=312, source=A100_DOC),
    _row("a100-sxm-80gb", "A100-SXM4-80GB", "A100-SXM-80GB",
         cc=GA100, sms=108, l2=40 * MIB, gb=80, bandwidth=2039, clock=1410, tflops=312, source=A100_DOC),
    _row("a100-pcie-40gb", "A100-PCIE-40GB",
         cc=GA100, sms=108, l2=40 * MIB, gb=40, bandwidth=1555, clock=1410, tflops=312, source=A100_DOC),
    _row("a100-pcie-80gb", "A100 80GB PCIe",
         cc=GA100, sms=108, l2=40 * MIB, gb=80, bandwidth=1935, clock=1410, tflops=312, source=A100_DOC),
    _row("a800-sxm-80gb", "A800-SXM4-80GB",
         cc=GA100, sms=108, l2=40 * MIB, gb=80, bandwidth=2039, clock=1410, tflops=312, source=A800_DOC),
    _row("a800-pcie-80gb", "A800 80GB PCIe",
         cc=GA100, sms=108, l2=40 * MIB, gb=80, bandwidth=1935, clock=1410, tflops=312, source=A800_DOC),
    _row("rtx-3090", "GeForce RTX 3090",
         cc=GA102, sms=82, l2=6 * MIB, gb=24, bandwidth=936, clock=1695, tflops=71, source=GA102_DOC),
    _row("rtx-a6000", "RTX A6000",
         cc=GA102, sms=84, l2=6 * MIB, gb=48, bandwidth=768, clock=1800, tflops=154.8, source=GA102_DOC),
    _row("rtx-4090", "GeForce RTX 4090",
         cc=ADA, sms=128, l2=72 * MIB, gb=24, bandwidth=1008, clock=2520, tflops=165.2, source=ADA_DOC),
    _row("rtx-6000-ada", "RTX 6000 Ada Generation",
         cc=ADA, sms=142, l2=96 * MIB, gb=48, bandwidth=960, clock=2505, tflops=364.2, source=ADA_DOC),
    _row("l4", "L4",
         cc=ADA, sms=58, l2=48 * MIB, gb=24, bandwidth=300, clock=2040, tflops=121,
         source="NVIDIA L4 datasheet; Ada GPU architecture whitepaper, appendix"),
    _row("l40s", "L40S",
         cc=ADA, sms=142, l2=96 * MIB, gb=48, bandwidth=864, clock=2520, tflops=362,
         source="NVIDIA L40S datasheet"),
    _row("h20", "H20",
         cc=HOPPER, sms=78, l2=60 * MIB, gb=96, bandwidth=4000, clock=1980, tflops=148,
         source="NVIDIA HGX H20 specification; clock as the driver reports it"),
    _row("h100-sxm", "H100 80GB HBM3",
         cc=HOPPER, sms=132, l2=50 * MIB, gb=80, bandwidth=3350, clock=1980, tflops=989.4, source=H100_DOC),
    _row("h100-pcie", "H100 PCIe",
         cc=HOPPER, sms=114, l2=50 * MIB, gb=80, bandwidth=2039, clock=1755, tflops=756, source=H100_DOC),
    _row("h100-nvl", "H100 NVL",
         cc=HOPPER, sms=132, l2=60 * MIB, gb=94, bandwidth=3938, clock=1785, tflops=835.5,
         source="NVIDIA H100 NVL product brief and datasheet"),
    _row("h800-sxm", "H800",
         cc=HOPPER, sms=132, l2=50 * MIB, gb=80, bandwidth=3350, clock=1980, tflops=989.4, source=H800_DOC),
    _row("h800-pcie", "H800 PCIe",
         cc=HOPPER, sms=114, l2=50 * MIB, gb=80, bandwidth=2039, clock=1755, tflops=756, source=H800_DOC),
    _row("h200", "H200",
         cc=HOPPER, sms=132, l2=60 * MIB, gb=141, bandwidth=4800, clock=1980, tflops=989.4,
         source="NVIDIA H200 Tensor Core GPU datasheet; L2 and clock read on the card"),
    _row("gh200-96gb", "GH200 480GB", "GH200 120GB",
         cc=HOPPER, sms=132, l2=60 * MIB, gb=96, bandwidth=4000, clock=1980, tflops=989.4,
         source="NVIDIA GH200 Grace Hopper Superchip datasheet"),
    _row("gh200-144gb", "GH200 144G HBM3e",
         cc=HOPPER, sms=132, l2=60 * MIB, gb=144, bandwidth=4900, clock=1980, tflops=989.4,
         source="NVIDIA GH200 Grace Hopper Superchip datasheet"),
    _row("b200", "B200",
         cc=BLACKWELL, sms=148, l2=132644864, gb=180, bandwidth=7700, clock=1965, tflops=2250,
         source="NVIDIA HGX B200 specification; SMs, L2 and clock as the driver reports them"),
    _row("gb200", "GB200",
         cc=BLACKWELL, sms=152, l2=135528448, gb=186, bandwidth=8000, clock=2062, tflops=2500,
         source="NVIDIA GB200 NVL72 datasheet, per GPU; SMs, L2 and clock as the driver reports them"),
    _row("b300", "B300 SXM6 AC",
         cc=BLACKWELL_ULTRA, sms=148, l2=132644864, gb=288, bandwidth=7700, clock=2032, tflops=2250,
         source="NVIDIA HGX B300 specification; SMs, L2 and clock as the driver reports them"),
    _row("gb300", "GB300",
         cc=BLACKWELL_ULTRA, sms=152, l2=135528448, gb=279, bandwidth=8000, clock=2070, tflops=2500,
         source="NVIDIA GB300 NVL72 datasheet, per GPU; SMs, L2 and clock as the driver reports them"),
    _row("rtx-5090", "GeForce RTX 5090",
         cc=BLACKWELL_RTX, sms=170, l2=96 * MIB, gb=32, bandwidth=1792, clock=2407, tflops=209.5,
         source=RTX_BLACKWELL_DOC),
    _row("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition",
         cc=BLACKWELL_RTX, sms=188, l2=128 * MIB, gb=96, bandwidth=1792, clock=2617, tflops=503.8, source=RTX_PRO_DOC),
    _row("rtx-pro-6000-max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
         cc=BLACKWELL_RTX, sms=188, l2=128 * MIB, gb=96, bandwidth=1792, clock=2280, tflops=438.9, source=RTX_PRO_DOC),
    _row("rtx-pro-6000-server", "RTX PRO 6000 Blackwell Server Edition",
         cc=BLACKWELL_RTX, sms=188, l2=128 * MIB, gb=96, bandwidth=1597, clock=2430, tflops=467.9, source=RTX_PRO_DOC),
)
# fmt: on

GPUS: dict[str, Gpu] = {row.gpu.name: row.gpu for row in ROWS}

REPORTED: dict[str, Gpu] = {name: row.gpu for row in ROWS for name in row.reported}
"""By the name that the driver reports, without ``NVIDIA`` in front."""

ALIASES: dict[str, str] = {
    "tesla-t4": "t4",
    "a100": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-80gb": "a100-sxm-80gb",
    "a100-sxm": "a100-sxm-80gb",
    "a100-pcie": "a100-pcie-80gb",
    "a800": "a800-sxm-80gb",
    "a800-sxm": "a800-sxm-80gb",
    "a800-pcie": "a800-pcie-80gb",
    "3090": "rtx-3090",
    "rtx3090": "rtx-3090",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "5090": "rtx-5090",
    "rtx5090": "rtx-5090",
    "a6000": "rtx-a6000",
    "6000-ada": "rtx-6000-ada",
    "rtx-6000-ada-generation": "rtx-6000-ada",
    "h100": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h800": "h800-sxm",
    "h200-sxm": "h200",
    "gh200": "gh200-96gb",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "pro-6000": "rtx-pro-6000",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
    "rtx-pro-6000-workstation": "rtx-pro-6000",
}
# What a driver reports is an alias too, in the form in which names are looked up.
ALIASES |= {
    alias: gpu.name
    for alias, gpu in ((name.lower().replace(" ", "-").removeprefix("geforce-"), gpu) for name, gpu in REPORTED.items())
    if alias not in GPUS and alias not in ALIASES
}


def gpu_by_alias(alias: str) -> Gpu:
    """The GPU called ``alias``: a name of the table, an alias, or what the driver reports.

    Any case; spaces and underscores count as dashes. An unknown name raises :class:`UnknownGpu` that lists the known.
    """
    wanted = re.sub(r"[\s_]+", "-", alias.strip().lower()).removeprefix("nvidia-").removeprefix("geforce-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted not in GPUS:
        close = difflib.get_close_matches(wanted, [*GPUS, *ALIASES], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UnknownGpu(f"GPU {alias[:60]!r} is not known.{hint} Known: {', '.join(GPUS)}")
    return GPUS[wanted]
