"""Cost of the journal and of durability; time of recovery and failover."""
