"""Hardware counters of each kernel, from Nsight Compute, joined to the kernels of the timed steps.

`ncu` runs the program once more and replays each kernel of one step; `reading` makes rows of its report, `metrics`
makes operations, memory traffic and occupancy of its counters, `joining` says which kernel of the timed steps each
row is of, and `storing` writes that into the run. A replayed kernel's time is never taken.
"""
