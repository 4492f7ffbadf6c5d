"""Results about a run, each computed once and on demand, for commands, views, notebooks and reports."""
