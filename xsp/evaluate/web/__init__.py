"""Evaluations in a browser and over REST: `xsp evaluate serve`.

```
guard      which requests are accepted: host, origin, type and size of the body
policy     which manifests are accepted from a network: none that names a file, a program or a variable
modelsize  counts the parameters of a model, before it is accepted
queue      one evaluation at a time, each in a subprocess; progress, cancelling
shelf      cached results of a folder
routes     REST (OpenAPI at /api/openapi.json) and pages, whose scripts are in assets/; no paths of the server
app        the server of both
```
"""
