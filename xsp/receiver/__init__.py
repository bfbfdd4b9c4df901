"""The embedded receiver: OTLP over HTTP and gRPC into run directories, without a Collector.

`journal` turns requests into files, `http` and `grpc` are its two transports, `limits` bounds concurrent work.
"""
