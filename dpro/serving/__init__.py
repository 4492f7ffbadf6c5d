"""What a server's latency and throughput consist of, from its requests and the iterations of its engine."""
