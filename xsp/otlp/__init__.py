"""Runs over OpenTelemetry's protocol.

`export` says what of a run goes out, and `live` sends while it is recorded; `delivery` counts, `zoom` splits traces
that are too large for a viewer, `encode` makes requests of spans in bulk, `send` brings them there by the senders of
`request`.
"""
