"""Each result about a run, computed once and on demand: for commands, views, notebooks and reports."""
