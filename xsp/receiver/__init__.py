"""The embedded receiver: OTLP over HTTP and gRPC, into run directories, for those who have no Collector.

`receiving` turns requests into files, `web` and `rpc` are its two doors, `limits` says how much goes on at a time.
"""
