"""Hardware counters of each kernel, from Nsight Compute, joined to the kernels of the timed steps.

`ncu` runs the program once more and replays each kernel of one step; `reading` parses its report into rows, `metrics`
computes operations, memory traffic and occupancy from its counters, `joining` matches each row with a kernel of the
timed steps, and `storing` writes the result into the run. The times of replayed kernels are never used.
"""
