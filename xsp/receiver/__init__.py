"""The embedded receiver: OTLP over HTTP and gRPC, into run directories, for those who have no Collector.

`journal` turns requests into files, `http` and `grpc` are its two transports, `limits` says how much goes on at a time.
"""
