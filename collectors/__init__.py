"""What runs beside or inside the job. Meets the analysis only at the schema.

Beside it: `launch` starts the job and `sidecar` watches it with `processes`; `convert`, `merge` and `finish`
make tables of what was recorded. Inside it: `recorder`, with `records`, `stepping` and `windows`, which use
the standard library and torch alone and are loaded by file path.
"""
