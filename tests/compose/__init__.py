"""Parts of `python -m tests.compose_smoke`: a container engine, images, the stack of compose.yaml, and load."""
