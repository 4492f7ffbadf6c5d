"""The timeline: every thread and stream of every rank on one clock, measured, and replayed once known.

    spans ─▶ lanes (rows that do not overlap) ─▶ detail (what a screen shows) ─▶ routes ─▶ assets/timeline*.js

| module | what it does |
|---|---|
| `lanes` | rows of spans of one rank, nested by depth, in compact arrays |
| `phases` | which spans belong to forward, backward and the optimizer |
| `clock` | one clock for all ranks, steps on it, and who waited for which rank in collectives |
| `measured` | reads a run rank by rank into lanes |
| `replayed` | lanes of a replay, and the critical path |
| `detail` | level of detail: segments of a viewport |
| `search` | spans by name |
| `facts` | the facts of one span, and arrows to and from it |
| `routes` | the HTTP requests of the timeline's page |
| `view` | the view's panels |
| `tracks`, `figure`, `causes` | the same timeline as a Plotly figure, for reports and notebooks |
"""
