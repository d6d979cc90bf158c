"""What the compiler makes of every kernel, seen without a GPU."""
