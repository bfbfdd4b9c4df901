"""Correlation: assign each span its parent, and the step, layer, phase, key and grade that follow from the parent."""
