"""Importers: other tools' traces into the tables of `dpro.schema`.

`importer` takes sources to a run; a format is a module or package that reads one file, listed in `formats`.
"""
