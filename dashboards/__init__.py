"""The web views: one file per view, the data of each apart from its figure; needs the extra `dashboard`.

In: an opened run. Out: a local web application. Nothing is computed here that a command could not print: the
views show what `dpro.replay` and `dpro.detect` find.
"""
