"""Runs over OpenTelemetry's protocol (OTLP).

`export` sends recorded runs, and `live` sends a run while it is recorded. `delivery` tracks what was delivered, `zoom`
splits traces that are too large for a viewer, `encode` encodes spans into requests in bulk, and `send` delivers the
requests through the senders of `transport`.
"""
