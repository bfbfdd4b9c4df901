"""What leaves xsp: spans as OTLP, encoded in bulk and split where a trace is too large for a viewer."""
