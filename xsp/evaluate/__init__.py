"""The same evaluation anywhere, again: a manifest says what to evaluate, and results are kept under its identity.

```
manifest, yamltext, reading, dialects    what is asked: YAML, checked, with a canonical form and its hash
pipeline, datasets                       samples, and what is done to them before and after the model
predictors, jsonlines, conformance       the contract of three calls: open, predict, close
load, quality                            when requests are due, latencies; what two evaluations say of each other
agents, running, transports              who runs it: this process, or one of its own; which agents satisfy a manifest
builtin, pitfalls                        manifests of many models; small differences before a model
results, standings, tables               what was found: one directory an evaluation
web                                      the same in a browser and over REST
```

Needs `pip install 'xsp[evaluate]'`; nothing else of xsp does.
"""
