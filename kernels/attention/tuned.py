"""Launch configurations of attention by shape; empty until `python -m benchmarks.tune_kernels` writes them."""

Row = tuple[str, str, int, int, int, int, int, int, int, int, int, int, int, float | None]

ROWS: tuple[Row, ...] = ()
