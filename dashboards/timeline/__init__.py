"""The timeline: all threads and streams of all ranks on one clock, measured and, once computed, replayed.

spans ─▶ lanes (rows that do not overlap) ─▶ detail (what a screen shows) ─▶ routes ─▶ assets/timeline*.js
"""
