"""The timeline: every thread and stream of every rank on one clock, measured, and replayed once known.

spans ─▶ lanes (rows that do not overlap) ─▶ detail (what a screen shows) ─▶ routes ─▶ assets/timeline*.js
"""
