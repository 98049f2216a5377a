"""What the makers of devices publish of them, by JAX's name for the device."""

from __future__ import annotations

# Floating-point operations a second of dense matrix products, in the arithmetic that JAX uses by
# default for float32: one pass in bfloat16 on a TPU, TF32 on a GPU. Where a chip is one device.
# TPU: cloud.google.com/tpu/docs, the page of each generation, 'peak compute per chip (bf16)'.
# GPU: NVIDIA's data sheets of the A100 and the H100 (SXM), without sparsity; the H200 computes
# like the H100.
_PEAK_FLOPS = {
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'NVIDIA A100-SXM': 156e12,
    'NVIDIA H100 80GB HBM3': 494.7e12,
    'NVIDIA H200': 494.7e12,
}

# Bytes a second that a chip can send over all of its links at once: half of what is published for
# both directions together.
# TPU: the same pages, 'bidirectional inter-chip interconnect bandwidth (per chip)', 400, 1200 and
# 800 GB/s; of v4, six links of 50 GB/s (Jouppi et al.: TPU v4, ISCA 2023).
# GPU: NVLink, in the same data sheets: 600 GB/s of the A100, 900 GB/s of the H100 and the H200.
_LINK_BANDWIDTH = {
    'TPU v4': 300e9,
    'TPU v5 lite': 200e9,
    'TPU v5': 600e9,
    'TPU v5p': 600e9,
    'TPU v6 lite': 400e9,
    'NVIDIA A100-SXM': 300e9,
    'NVIDIA H100 80GB HBM3': 450e9,
    'NVIDIA H200': 450e9,
}


def peak_flops(device_kind: str) -> float | None:
    """Of one device; None where it is not known."""
    return _look_up(_PEAK_FLOPS, device_kind)


def link_bandwidth(device_kind: str) -> float | None:
    """Bytes a second that one device can send; None where it is not known."""
    return _look_up(_LINK_BANDWIDTH, device_kind)


def _look_up(table: dict[str, float], device_kind: str) -> float | None:
    # 'NVIDIA A100-SXM4-40GB' is one, 'TPU v5 lite' is no 'TPU v5'
    if device_kind in table:
        return table[device_kind]
    return table['NVIDIA A100-SXM'] if device_kind.startswith('NVIDIA A100-SXM') else None
