"""Reproducible evaluations on any machine: a manifest defines what to evaluate, and results are stored under its hash.

```
manifest, yamltext, reading, dialects    the manifest: YAML, validated, with a canonical form and its hash
pipeline, datasets                       samples, and the steps before and after the model
predictors, jsonlines, conformance       the contract of three calls: open, predict, close
load, generation, quality                schedules and latencies; generated text; comparison of two evaluations
agents, running, transports              execution in this process or a subprocess; which agents satisfy a manifest
builtin, pitfalls                        manifests of many models; small differences before a model
figures, results, standings, tables      the results: one directory per evaluation
web                                      the same in a browser and over REST
```

It needs `pip install 'xsp[evaluate]'`; the rest of xsp does not.
"""
