"""What the kernel says of the clock. Weak evidence, of use in one direction only."""

from __future__ import annotations

# Larger than `struct timex` on every ABI; all zero, its field `modes` asks to read and changes nothing.
TIMEX_BYTES = 512
TIME_ERROR = 5  # <sys/timex.h>: the clock is not synchronised


def kernel_synchronised() -> bool | None:
    """True: some daemon keeps the clock (adjtimex(2) does not answer TIME_ERROR). False says little: chrony without
    `rtcsync` never tells the kernel. None: the kernel may not be asked here, as in many containers."""
    try:
        import ctypes

        answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (ImportError, OSError, AttributeError):  # a Python or a C library without it
        return None
    return None if answer < 0 else answer != TIME_ERROR
