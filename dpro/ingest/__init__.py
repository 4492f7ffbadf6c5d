"""Importers: other tools' traces into the tables of `dpro.schema`, one file per format."""
