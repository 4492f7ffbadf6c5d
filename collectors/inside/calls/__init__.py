"""Probes of communication: collective calls, messages, gradient buckets and device meshes."""
