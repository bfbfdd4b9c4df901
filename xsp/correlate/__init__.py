"""Each span gets its parent, and what follows from it: step, layer, phase, key and grade."""
