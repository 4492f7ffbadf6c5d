"""The timeline: every thread and stream of every rank on one clock, measured, and replayed once known.

    spans ─▶ lanes (rows that do not overlap) ─▶ detail (what a screen shows) ─▶ routes ─▶ assets/timeline*.js

| module | what it does | |---|---| | `lanes` | rows of spans of one rank, nested by depth, in compact arrays,
and which phase each belongs to | | `measured` | reads a run rank by rank into lanes on one clock, and who
waited for which rank in collectives | | `replayed` | lanes of a replay, and the critical path | | `detail` |
level of detail: segments of a viewport | | `search` | spans by name | | `facts` | the facts of one span,
measured or replayed, and arrows to and from it | | `routes` | the HTTP requests of the timeline's page; its
panels are `views/timeline.py` | | `figure` | the replayed timeline as a Plotly figure, for reports and
notebooks |
"""
