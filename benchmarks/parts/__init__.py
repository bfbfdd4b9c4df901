"""What the benchmarks are made of: the method, the models, fabricated input, and the page of figures."""
