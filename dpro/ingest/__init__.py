"""Importers: traces of other tools converted to the tables of `dpro.schema`.

`importer` walks the sources, `formats` recognises the format of a file by its content (dpro's own formats,
then entry points of other distributions), and one importer per format reads it into one or several ranks.
Files are tasks: they run in a pool, on any executor, or in shards, and the same input gives the same bytes.
"""
