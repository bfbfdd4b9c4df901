"""Comparison of two evaluations, and the quality of the outputs of one.

```
accuracy      top-k, average precision of boxes, intersection over union, perplexity, PSNR
divergence    distances between the outputs of two evaluations
judging       whether two evaluations are the same: by outputs, latency and environment
choices       optimal batch, Pareto front, cost, rank correlation over many evaluations
```
"""

from xsp.evaluate.quality.judging import Judgement, Outcome, Reason, Verdict, judge, settle

__all__ = ["Judgement", "Outcome", "Reason", "Verdict", "judge", "settle"]
