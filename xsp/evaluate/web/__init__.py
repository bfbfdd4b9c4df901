"""Evaluations in a browser and over REST: `xsp evaluate serve`.

```
guard      which requests come in: host, origin, kind and size of the body
policy     which manifests are taken from a network: none that names a file, a program or a variable
queue      one evaluation at a time, each in a process of its own; progress, cancelling
shelf      results of a folder, read once
routes     REST (OpenAPI at /api/openapi.json) and pages; assets/ is what the pages are made of
app        the server of both
```
"""
