"""Base images and wheels of the images of compose.yaml, and settings of workers that are many on a small machine."""

from tests.compose import base_images, wheels
from tests.compose.engine import Engine, say

# In float32, in which equal outputs are defined: logits in bfloat16 tie too often.
SMALL_WORKERS = {
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_WORKER_KV_MEMORY_BYTES": str(64 * 2**20),
    "QUIRE_WORKER_DTYPE": "float32",
}


def variables_of_images(engine: Engine) -> dict[str, str]:
    """Provide base images and wheels, and return the variables of compose.yaml that name them. Raises SmokeError."""
    python = base_images.provide(engine, base_images.PYTHON_IMAGE)
    base_images.check_python(engine, python)
    builder = base_images.provide(engine, base_images.BUILDER_IMAGE)
    redis = base_images.provide(engine, base_images.REDIS_IMAGE)
    say(f"base images: {python}, {builder}, {redis}")
    wheels.gather()
    return {
        base_images.PYTHON_IMAGE.variable: python,
        base_images.BUILDER_IMAGE.variable: builder,
        base_images.REDIS_IMAGE.variable: redis,
        "PIP_NO_INDEX": "1",
        "TORCH_INDEX": "",
    }
