"""Importers: one file per format, found by name through the entry points `xsp.importers`.

`xsp.importers.contract` defines what an importer is.
"""
