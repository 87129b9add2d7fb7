"""Format durations and speeds for logs and screens."""

__all__ = ["format_duration", "format_mfu", "format_tflops"]


def format_duration(seconds: float) -> str:
    """Format a duration: `12 s`, `2:05`, `1:00:00`, `3 d 04:05`."""
    whole = int(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours_of_day:02}:{minutes:02}"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def format_mfu(full: float, causal: float) -> str:
    """Format the model FLOPs utilization, with attention in full and without what the causal mask hides."""
    return f"MFU {full:.1%} (causal {causal:.1%})"


def format_tflops(tflops: float) -> str:
    """Format a speed with three digits: `130 TFLOP/s`, below 0.1 TFLOP/s in GFLOP/s."""
    return f"{tflops:.3g} TFLOP/s" if tflops >= 0.1 else f"{1000 * tflops:.3g} GFLOP/s"
