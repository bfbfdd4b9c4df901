"""What sees a GPU: CUPTI's records of device work, the libraries' own calls, graphs.

Three collectors: `cupti` (device work), `loggers` (libraries' logs) and `profilerrange` (the step that Nsight Compute
replays). The rest serves `cupti`, in this order:

- may it: `libcupti` (do versions fit), `claim` (is CUPTI taken), `cuptitrial` (does one kernel come through);
- before the program: `injection` has libraries name their calls;
- hot: `recording` switches records on and off, `activities` copies them into tuples, on the clock of `hostclock`;
- cold: `calls`, `devicespans` and `libraries` make spans of them; `threads`, `callnames`, `demangling` and
  `kernellibraries` give these their names; `graphs` finds the layers of replayed graphs.

Nothing here imports `cupti` when it is imported itself: the extra may be absent, and then says so.
"""
