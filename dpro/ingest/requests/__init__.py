"""Logs of requests that a server answered: JSON lines, JSON, CSV and OpenTelemetry spans.

rows      the rows of a file, flat, by name of the column
columns   what columns mean, and in which unit they are
log       rows of the table `requests`
"""
