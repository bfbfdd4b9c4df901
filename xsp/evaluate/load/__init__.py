"""Load: when requests are due, how they are issued to a model, and the statistics of their latencies.

```
schedules    when each request is due, and its number of inputs; drawn beforehand from a seed
driving      applies a schedule to a function that predicts, on a real clock or a simulated one
requests     the times of each request
latencies    percentiles with intervals, throughput, lateness, checks of queueing
search       the highest rate at which a percentile stays within a limit, as an interval
loadgen      the same with MLPerf's LoadGen, if installed
```
"""

from xsp.evaluate.load.driving import Clock, Progress, VirtualClock, drive, simulate
from xsp.evaluate.load.requests import Requests
from xsp.evaluate.load.schedules import Schedule

__all__ = ["Clock", "Progress", "Requests", "Schedule", "VirtualClock", "drive", "simulate"]
