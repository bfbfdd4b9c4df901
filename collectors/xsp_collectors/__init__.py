"""What runs inside the measured program: xsp's own collectors, one file each, and those of GPUs in `cuda`.

They are entry points of the group `xsp.collectors`, like anybody's; `README.md` beside this package shows
how to write one.
"""
