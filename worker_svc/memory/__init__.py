"""KV memory: how many blocks fit, and the device and host pools that hold them."""
