"""Launch configurations of attention by shape: written by `benchmarks.gpu.tune_kernels`, not by hand.

A shape without a row is launched by a rule. `ORIGIN` names the source of the rows; a row without a time was chosen by
the compiler's report of registers and shared memory, and not measured.
"""

Row = tuple[str, str, int, int, int, int, int, int, int, int, int, int, int, float | None]

ORIGIN = {
    "source": "compile gate, not measured",
    "command": "python -m benchmarks.tune_kernels --from-gate",
    "device": "none",
    "triton": "3.9.0",
    "torch": "2.13.0+cpu",
    "commit": "3c7dd798210070e4cf63d421462afc223596328a",
}

# Kernel, family of devices, heads that share a key-value head, head dimension, bits of queries, bits of keys:
# rows of a tile, keys, warps, stages, programs a multiprocessor, registers a thread, bytes shared, us
ROWS: tuple[Row, ...] = (
    ("decode", "sm_90", 1, 64, 16, 16, 16, 128, 4, 5, 3, 96, 72704, None),
    ("decode", "sm_90", 1, 128, 16, 8, 16, 64, 4, 5, 2, 160, 39424, None),
    ("decode", "sm_90", 1, 128, 16, 16, 16, 64, 4, 5, 3, 158, 72192, None),
    ("decode", "sm_90", 2, 128, 16, 16, 16, 64, 4, 5, 3, 143, 72192, None),
    ("decode", "sm_90", 4, 64, 16, 16, 16, 128, 4, 5, 3, 95, 72704, None),
    ("decode", "sm_90", 4, 128, 16, 8, 16, 64, 4, 5, 2, 160, 39424, None),
    ("decode", "sm_90", 4, 128, 16, 16, 16, 64, 4, 5, 3, 143, 72192, None),
    ("decode", "sm_90", 5, 128, 16, 16, 16, 64, 4, 5, 3, 117, 72192, None),
    ("decode", "sm_90", 7, 128, 16, 16, 16, 64, 4, 5, 3, 117, 72192, None),
    ("decode", "sm_90", 8, 128, 16, 8, 16, 64, 4, 5, 2, 146, 39424, None),
    ("decode", "sm_90", 8, 128, 16, 16, 16, 64, 4, 5, 3, 115, 72192, None),
    ("prefill", "sm_90", 1, 64, 16, 16, 128, 64, 8, 5, 1, 127, 66560, None),
    ("prefill", "sm_90", 1, 128, 16, 8, 128, 64, 8, 5, 1, 177, 82432, None),
    ("prefill", "sm_90", 1, 128, 16, 16, 128, 64, 8, 5, 1, 187, 132096, None),
    ("prefill", "sm_90", 2, 128, 16, 16, 128, 64, 8, 5, 1, 203, 132096, None),
    ("prefill", "sm_90", 4, 64, 16, 16, 128, 64, 8, 5, 1, 124, 66560, None),
    ("prefill", "sm_90", 4, 128, 16, 8, 128, 64, 8, 5, 1, 185, 82432, None),
    ("prefill", "sm_90", 4, 128, 16, 16, 128, 64, 8, 5, 1, 203, 132096, None),
    ("prefill", "sm_90", 5, 128, 16, 16, 128, 64, 8, 5, 1, 204, 132096, None),
    ("prefill", "sm_90", 7, 128, 16, 16, 128, 64, 8, 5, 1, 215, 132096, None),
    ("prefill", "sm_90", 8, 128, 16, 8, 128, 64, 8, 5, 1, 185, 82432, None),
    ("prefill", "sm_90", 8, 128, 16, 16, 128, 64, 8, 5, 1, 203, 132096, None),
    ("prefix", "sm_90", 1, 64, 16, 16, 64, 64, 4, 4, 2, 126, 41216, None),
    ("prefix", "sm_90", 1, 128, 16, 8, 64, 64, 4, 4, 2, 165, 49408, None),
    ("prefix", "sm_90", 1, 128, 16, 16, 64, 64, 4, 4, 2, 207, 82176, None),
    ("prefix", "sm_90", 2, 128, 16, 16, 64, 64, 4, 4, 2, 223, 82176, None),
    ("prefix", "sm_90", 4, 64, 16, 16, 64, 64, 4, 4, 2, 128, 41216, None),
    ("prefix", "sm_90", 4, 128, 16, 8, 64, 64, 4, 4, 2, 242, 49408, None),
    ("prefix", "sm_90", 4, 128, 16, 16, 64, 64, 4, 4, 2, 223, 82176, None),
    ("prefix", "sm_90", 5, 128, 16, 16, 64, 64, 4, 4, 2, 224, 82176, None),
    ("prefix", "sm_90", 7, 128, 16, 16, 64, 64, 4, 4, 2, 224, 82176, None),
    ("prefix", "sm_90", 8, 128, 16, 8, 64, 64, 4, 4, 2, 242, 49408, None),
    ("prefix", "sm_90", 8, 128, 16, 16, 64, 64, 4, 4, 2, 223, 82176, None),
)
