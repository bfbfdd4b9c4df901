"""The calls of a model under the spans of a service's own requests.

`instrument` is the handle of a service, `sampling` chooses the calls to record, `calls` and `windows` record them, and
`provider` delivers their spans in the background. `worker` is the process that assigns parents to these spans.
"""
