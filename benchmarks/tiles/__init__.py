"""Reduction and scan as products of 16×16 tiles: a case study of what matrix units can do beside matrix products.

`reference` computes in NumPy what the tiles compute, `kernels` the same on a device in Triton. See docs/use/tiles.md.
"""
