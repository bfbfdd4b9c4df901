"""Files for other viewers: one file per format, found by name through the entry points `xsp.exporters`.

`xsp.exporters.contract` defines what an exporter is.
"""
