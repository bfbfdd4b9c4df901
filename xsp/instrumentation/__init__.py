"""The calls of a model under the spans of a service's own requests.

`instrumented` is what a service holds, `choosing` says which calls are recorded, `calls` records them, `handover` takes
them out of the service's way, and `correlating` is the process that gives their spans parents.
"""
