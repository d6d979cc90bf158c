"""Steps: fenced, checked against the seats, executed in order, answered in order. Knows no model."""
