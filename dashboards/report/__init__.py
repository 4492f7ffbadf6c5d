"""The report of a run as one self-contained HTML file: it needs no network, no server and no dpro."""
