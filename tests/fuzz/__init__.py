"""`make fuzz`: hostile input of every kind against real processes, from a seed."""
