"""Files for other viewers: a format is one file, found by name through the entry points `xsp.exporters`.

What an exporter is stands in `contract`.
"""
