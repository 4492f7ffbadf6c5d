"""The report of a run as one HTML file that needs nothing else: no network, no server, no dpro.

page         the figures, tables and words of a run, put into the template
report.html  the template
report.js    unpacks the drawing library and draws each figure
"""
