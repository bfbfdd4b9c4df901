"""Load: when requests are due, how they are put to a model, and what their latencies say.

```
schedules    when each request is due, and how many inputs it has; drawn beforehand from a seed
driving      puts a schedule to a function that predicts, on a real clock or a simulated one
requests     what came of each request
latencies    percentiles with intervals, throughput, lateness, checks of queueing
search       the highest rate at which a percentile stays within a limit, as an interval
loadgen      the same by MLPerf's LoadGen, where it is installed
```
"""

from xsp.evaluate.load.driving import Clock, VirtualClock, drive, simulate
from xsp.evaluate.load.requests import Requests
from xsp.evaluate.load.schedules import Schedule

__all__ = ["Clock", "Requests", "Schedule", "VirtualClock", "drive", "simulate"]
