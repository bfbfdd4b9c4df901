"""Shared parts of the benchmarks: the method, the models, fabricated input, and the page of figures."""
