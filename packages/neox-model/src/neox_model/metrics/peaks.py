"""The peak speed of devices, for the model FLOPs utilization (MFU).

Dense matrix products on tensor cores with accumulation in float32, without sparsity, as the vendors' data
sheets state them. float32 is the speed without TF32, which torch does not use by default.
"""

from collections.abc import Mapping

__all__ = ["PEAK_TFLOPS", "peak_tflops"]

# Part of the device's name -> TFLOP/s in 16 bits and in float32; the first that fits, so longer ones first.
PEAK_TFLOPS: Mapping[str, tuple[float, float]] = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200 NVL": (835.0, 60.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "GH200": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 31.5),
    "A10": (125.0, 31.2),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
}


def peak_tflops(device_name: str | None, precision: str) -> tuple[float | None, str | None]:
    """Return the peak TFLOP/s of a device, or None and the reason.

    Args:
        device_name: the name that its driver reports; None: the training runs on CPUs.
        precision: `fp32`, `bf16` or `fp16`.
    """
    if device_name is None:
        return None, "a CPU has no single peak speed"
    words = device_name.replace("-", " ")
    for name, (half, single) in PEAK_TFLOPS.items():
        if f" {name} " in f" {words} ":
            return (single if precision == "fp32" else half), None
    return None, f"the peak speed of {device_name} is not in the table (neox_model/metrics/peaks.py)"
