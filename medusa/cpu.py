"""What the operating system says about the CPU."""

from __future__ import annotations

from pathlib import Path


def cpuinfo(*fields: str) -> list[str]:
    """Read the values of `fields` in Linux's /proc/cpuinfo, one per CPU core. On other systems, the list is empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() in fields]


def has_fast_bfloat16() -> bool:
    """Check whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX, Arm BF16). Unknown counts as False."""
    return any({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()) for line in cpuinfo("flags", "Features"))
