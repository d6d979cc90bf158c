"""KV memory: the number of blocks that fit, and the device and host pools that hold them."""
