"""Launch configurations of attention by shape: written by `benchmarks.gpu.tune_kernels`, not by hand.

A shape without a row is launched by a rule. `ORIGIN` names the source of the rows; a row without a time was chosen by
the compiler's report of registers and shared memory, and not measured.
"""

Row = tuple[str, str, int, int, int, int, int, int, int, int, int, int, int, float | None]

ORIGIN = {
    "source": "compile gate, not measured",
    "command": "python -m benchmarks.gpu.tune_kernels --from-gate --only prefill",
    "device": "none",
    "triton": "3.9.0",
    "torch": "2.13.0+cpu",
    "commit": "c4b098af66bc57b56ddceb1272627e02fd665cc1",
}

# Kernel, family of devices, heads that share a key-value head, head dimension, bits of queries, bits of keys:
# rows of a tile, keys, warps, stages, programs a multiprocessor, registers a thread, bytes shared, us
ROWS: tuple[Row, ...] = (
    ("decode", "sm_90", 1, 64, 16, 16, 16, 128, 4, 5, 3, 84, 72704, None),
    ("decode", "sm_90", 1, 128, 16, 8, 16, 64, 4, 5, 4, 98, 39936, None),
    ("decode", "sm_90", 1, 128, 16, 16, 16, 64, 4, 5, 3, 96, 72192, None),
    ("decode", "sm_90", 2, 128, 16, 16, 16, 64, 4, 5, 3, 104, 72192, None),
    ("decode", "sm_90", 4, 64, 16, 16, 16, 128, 4, 5, 3, 86, 72704, None),
    ("decode", "sm_90", 4, 128, 16, 8, 16, 64, 4, 5, 4, 98, 39936, None),
    ("decode", "sm_90", 4, 128, 16, 16, 16, 64, 4, 5, 3, 88, 72192, None),
    ("decode", "sm_90", 5, 128, 16, 16, 16, 64, 4, 5, 3, 76, 72192, None),
    ("decode", "sm_90", 7, 128, 16, 16, 16, 64, 4, 5, 3, 76, 72192, None),
    ("decode", "sm_90", 8, 128, 16, 8, 16, 64, 4, 5, 4, 75, 39936, None),
    ("decode", "sm_90", 8, 128, 16, 16, 16, 64, 4, 5, 3, 71, 72192, None),
    ("prefill", "sm_90", 1, 64, 16, 16, 128, 64, 8, 5, 1, 165, 82944, None),
    ("prefill", "sm_90", 1, 128, 16, 8, 128, 64, 8, 5, 1, 217, 66560, None),
    ("prefill", "sm_90", 1, 128, 16, 16, 128, 64, 8, 5, 1, 206, 148480, None),
    ("prefill", "sm_90", 2, 128, 16, 16, 128, 64, 8, 5, 1, 207, 148480, None),
    ("prefill", "sm_90", 4, 64, 16, 16, 128, 64, 8, 5, 1, 173, 82944, None),
    ("prefill", "sm_90", 4, 128, 16, 8, 128, 64, 8, 5, 1, 221, 66560, None),
    ("prefill", "sm_90", 4, 128, 16, 16, 128, 64, 8, 5, 1, 207, 148480, None),
    ("prefill", "sm_90", 5, 128, 16, 16, 128, 64, 8, 5, 1, 207, 148480, None),
    ("prefill", "sm_90", 7, 128, 16, 16, 128, 64, 8, 5, 1, 207, 148480, None),
    ("prefill", "sm_90", 8, 128, 16, 8, 128, 64, 8, 5, 1, 221, 66560, None),
    ("prefill", "sm_90", 8, 128, 16, 16, 128, 64, 8, 5, 1, 207, 148480, None),
    ("prefix", "sm_90", 1, 64, 16, 16, 64, 64, 4, 4, 2, 165, 41216, None),
    ("prefix", "sm_90", 1, 128, 16, 8, 64, 64, 4, 4, 2, 217, 49664, None),
    ("prefix", "sm_90", 1, 128, 16, 16, 64, 64, 4, 4, 2, 219, 82176, None),
    ("prefix", "sm_90", 2, 128, 16, 16, 64, 64, 4, 4, 2, 244, 82176, None),
    ("prefix", "sm_90", 4, 64, 16, 16, 64, 64, 4, 4, 2, 150, 41216, None),
    ("prefix", "sm_90", 4, 128, 16, 8, 64, 64, 4, 4, 2, 216, 49664, None),
    ("prefix", "sm_90", 4, 128, 16, 16, 64, 64, 4, 4, 2, 244, 82176, None),
    ("prefix", "sm_90", 5, 128, 16, 16, 64, 64, 4, 4, 2, 237, 82176, None),
    ("prefix", "sm_90", 7, 128, 16, 16, 64, 64, 4, 4, 2, 237, 82176, None),
    ("prefix", "sm_90", 8, 128, 16, 8, 64, 64, 4, 4, 2, 216, 49664, None),
    ("prefix", "sm_90", 8, 128, 16, 16, 64, 64, 4, 4, 2, 244, 82176, None),
)
