"""Leadership: the lease, the standby that waits for it, and the journal that it follows meanwhile."""
