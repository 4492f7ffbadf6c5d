"""The report of a run as one self-contained HTML file: it needs no network, no server and no dpro.

page         the figures, tables and words of a run, put into the template
report.html  the template
report.js    decompresses the drawing library and draws each figure
"""
