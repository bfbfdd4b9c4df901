"""Importers: one file a format, found by name through the entry points `xsp.importers`.

What an importer is stands in `xsp.importers.contract`.
"""
