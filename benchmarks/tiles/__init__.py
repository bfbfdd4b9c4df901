"""Reduction and scan as products of 16×16 tiles: a case study of matrix units for other work than matrix products.

`reference` implements the algorithms in NumPy, `kernels` implements them on a device in Triton. See docs/use/tiles.md.
"""
