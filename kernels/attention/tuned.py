"""Launch configurations of attention by shape: written by `benchmarks.tune_kernels`, not by hand.

What has no row here is launched by rule. `ORIGIN` says where the rows are from; one without a time was chosen from what
the compiler reports of registers and shared memory, and not measured.
"""

Row = tuple[str, str, int, int, int, int, int, int, int, int, int, int, int, float | None]

ORIGIN = {
    "source": "compile gate, not measured",
    "command": "python -m benchmarks.tune_kernels --from-gate",
    "device": "none",
    "triton": "3.6.0",
    "torch": "2.13.0+cpu",
    "commit": "7766c9bcc36a72d623c821da11f671188059e20a",
}

# Kernel, family of devices, heads that share a key-value head, head dimension, bits of queries, bits of keys:
# rows of a tile, keys, warps, stages, programs a multiprocessor, registers a thread, bytes shared, us
ROWS: tuple[Row, ...] = (
    ("decode", "sm_90", 1, 64, 16, 16, 16, 128, 4, 5, 3, 106, 72704, None),
    ("decode", "sm_90", 1, 128, 16, 8, 16, 64, 4, 5, 2, 206, 39424, None),
    ("decode", "sm_90", 1, 128, 16, 16, 16, 64, 4, 5, 3, 140, 72192, None),
    ("decode", "sm_90", 2, 128, 16, 16, 16, 64, 4, 5, 3, 139, 72192, None),
    ("decode", "sm_90", 4, 64, 16, 16, 16, 128, 4, 5, 3, 122, 72704, None),
    ("decode", "sm_90", 4, 128, 16, 8, 16, 64, 4, 5, 2, 202, 39424, None),
    ("decode", "sm_90", 4, 128, 16, 16, 16, 64, 4, 5, 3, 128, 72192, None),
    ("decode", "sm_90", 5, 128, 16, 16, 16, 64, 4, 5, 3, 151, 72192, None),
    ("decode", "sm_90", 7, 128, 16, 16, 16, 64, 4, 5, 3, 151, 72192, None),
    ("decode", "sm_90", 8, 128, 16, 8, 16, 64, 4, 5, 2, 168, 39424, None),
    ("decode", "sm_90", 8, 128, 16, 16, 16, 64, 4, 5, 3, 149, 72192, None),
    ("prefill", "sm_90", 1, 64, 16, 16, 128, 64, 8, 5, 1, 124, 66560, None),
    ("prefill", "sm_90", 1, 128, 16, 8, 128, 64, 8, 5, 1, 183, 82432, None),
    ("prefill", "sm_90", 1, 128, 16, 16, 128, 64, 8, 5, 1, 187, 132096, None),
    ("prefill", "sm_90", 2, 128, 16, 16, 128, 64, 8, 5, 1, 187, 132096, None),
    ("prefill", "sm_90", 4, 64, 16, 16, 128, 64, 8, 5, 1, 125, 66560, None),
    ("prefill", "sm_90", 4, 128, 16, 8, 128, 64, 8, 5, 1, 182, 82432, None),
    ("prefill", "sm_90", 4, 128, 16, 16, 128, 64, 8, 5, 1, 187, 132096, None),
    ("prefill", "sm_90", 5, 128, 16, 16, 128, 64, 8, 5, 1, 187, 132096, None),
    ("prefill", "sm_90", 7, 128, 16, 16, 128, 64, 8, 5, 1, 187, 132096, None),
    ("prefill", "sm_90", 8, 128, 16, 8, 128, 64, 8, 5, 1, 182, 82432, None),
    ("prefill", "sm_90", 8, 128, 16, 16, 128, 64, 8, 5, 1, 187, 132096, None),
    ("prefix", "sm_90", 1, 64, 16, 16, 64, 64, 4, 4, 2, 128, 41216, None),
    ("prefix", "sm_90", 1, 128, 16, 8, 64, 64, 4, 4, 2, 200, 49408, None),
    ("prefix", "sm_90", 1, 128, 16, 16, 64, 64, 4, 4, 2, 217, 82176, None),
    ("prefix", "sm_90", 2, 128, 16, 16, 64, 64, 4, 4, 2, 219, 82176, None),
    ("prefix", "sm_90", 4, 64, 16, 16, 64, 64, 4, 4, 2, 127, 41216, None),
    ("prefix", "sm_90", 4, 128, 16, 8, 64, 64, 4, 4, 2, 246, 49408, None),
    ("prefix", "sm_90", 4, 128, 16, 16, 64, 64, 4, 4, 2, 219, 82176, None),
    ("prefix", "sm_90", 5, 128, 16, 16, 64, 64, 4, 4, 2, 219, 82176, None),
    ("prefix", "sm_90", 7, 128, 16, 16, 64, 64, 4, 4, 2, 222, 82176, None),
    ("prefix", "sm_90", 8, 128, 16, 8, 64, 64, 4, 4, 2, 246, 49408, None),
    ("prefix", "sm_90", 8, 128, 16, 16, 64, 64, 4, 4, 2, 219, 82176, None),
)
