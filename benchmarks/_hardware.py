"""Published peaks of devices, by JAX's name for the device."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """What one device can do.

    Flops are floating-point operations per second of dense matrix products, in the arithmetic that
    JAX uses by default for float32: one bfloat16 pass on a TPU, TF32 on a GPU. Bandwidth is the
    bytes per second that a device can send over all of its links at once: half of what is published
    for both directions together.
    """

    flops: float
    bandwidth: float


# TPU: cloud.google.com/tpu/docs, the page of each generation, 'peak compute per chip (bf16)' and
# 'bidirectional inter-chip interconnect bandwidth (per chip)'; links of v4: six of 50 GB/s (Jouppi
# et al.: TPU v4, ISCA 2023). Only chips that are one device each.
# GPU: NVIDIA's data sheets of the A100 and the H100 (SXM), without sparsity, and NVLink; the H200
# computes like the H100.
PEAKS = {
    'TPU v4': Peak(275e12, 300e9),
    'TPU v5 lite': Peak(197e12, 200e9),
    'TPU v5': Peak(459e12, 600e9),
    'TPU v5p': Peak(459e12, 600e9),
    'TPU v6 lite': Peak(918e12, 400e9),
    'NVIDIA A100-SXM': Peak(156e12, 300e9),
    'NVIDIA H100 80GB HBM3': Peak(494.7e12, 450e9),
    'NVIDIA H200': Peak(494.7e12, 450e9),
}


def published_peak(device_kind: str) -> Peak | None:
    """None if it is not known."""
    # 'NVIDIA A100-SXM4-40GB' is an A100-SXM, but 'TPU v5 lite' is not a 'TPU v5'
    a100 = 'NVIDIA A100-SXM'
    return PEAKS.get(a100 if device_kind.startswith(a100) else device_kind)
