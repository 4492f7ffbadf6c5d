"""The view of the fabric: hosts, switches and cables, coloured by their load.

figure  where nodes are drawn, what cables carry, and the figure
view    the view, with the paths that are chosen and the connections that meet
"""
