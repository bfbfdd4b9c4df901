"""Samples taken while a block is open: power, clocks, memory and utilisation of devices, process and machine.

The process that stores the steps (`xsp.record.writer`) takes the samples, so the measured program does no extra work.
They are stored next to the spans of the run, with the columns of `xsp.schema.SAMPLE_COLUMNS` and on the same clock.
"""
