"""Probes of servers: the iterations of their engine, and the requests that they answer."""
