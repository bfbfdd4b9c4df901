"""What leaves xsp: runs over OpenTelemetry's protocol, and files for other viewers.

Sending: `export` says what of a run goes out, and `live` sends while it is recorded; `delivery` counts, `zoom` splits
traces that are too large for a viewer, `encode` makes requests of spans in bulk, `courier` brings them there by the
senders of `otlp`. A file format is one file, found by name through the entry points `xsp.exporters`; what it is stands
in `contract`.
"""
