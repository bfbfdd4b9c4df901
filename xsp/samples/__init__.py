"""What is read beside the spans while a block is open: power, clocks, memory and use of devices, process and machine.

Samples are taken in the process that stores the steps (`xsp.record.writer`), so the measured program does none of it.
They lie beside the spans in the run directory, with the columns of `xsp.schema.SAMPLE_COLUMNS` and on the same clock.
"""
