"""A seeded mutation run: small faults in the code, one at a time, and whether the related tests find them."""
