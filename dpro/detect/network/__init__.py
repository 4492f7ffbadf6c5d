"""Links, ports, hosts and parts of the network that move data slower than comparable ones, or than before."""
