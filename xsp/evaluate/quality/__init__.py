"""What two evaluations say of each other, and what the outputs of one are worth.

```
accuracy      top-k, average precision of boxes, intersection over union, perplexity, PSNR
divergence    how far the outputs of two evaluations are apart
judging       whether two evaluations are the same: by outputs, latency and environment
choices       optimal batch, Pareto front, cost, rank correlation over many evaluations
```
"""

from xsp.evaluate.quality.judging import Judgement, Outcome, Reason, Verdict, judge, settle

__all__ = ["Judgement", "Outcome", "Reason", "Verdict", "judge", "settle"]
