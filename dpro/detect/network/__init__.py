"""Detectors of links, ports, hosts and parts of the network slower than comparable ones, or than before."""
