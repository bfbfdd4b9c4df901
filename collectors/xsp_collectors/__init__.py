"""The code that runs inside the measured program: xsp's own collectors, one file each; those for GPUs are in `cuda`.

They are entry points of the group `xsp.collectors`, as third-party collectors are; `README.md` beside this package
shows how to write one.
"""
