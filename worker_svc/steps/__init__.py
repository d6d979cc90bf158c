"""Steps: fenced, checked against the slots, executed in order, answered in order. Knows no model."""
