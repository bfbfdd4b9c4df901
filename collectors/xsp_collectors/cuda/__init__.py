"""Recording of GPUs: CUPTI's records of device work, the libraries' own calls, graphs.

There are three collectors: `cupti` (device work), `loggers` (libraries' logs) and `profilerrange` (the step that Nsight
Compute replays). The other modules serve `cupti`, in this order:

- availability: `libcupti` (whether versions fit), `claim` (whether CUPTI is taken), `cuptitrial` (a trial kernel);
- before the program: `libraries` makes GPU libraries name their calls;
- hot: `recording` switches records on and off, on the host's clock, `activities` copies them into tuples;
- after a step: `devices` waits for all devices;
- cold: `calls`, `devicespans` and `libraries` make spans of them, with names; `graphs` finds the layers of replayed
  graphs.

No module imports `cupti` at import time, because the optional dependency may be absent; `cupti` then reports that.
"""
