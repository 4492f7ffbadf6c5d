"""What parts of a job cost, by models that are fitted to it or published.

link_costs              latency and bandwidth of each operation and group, from its own transfers
collective_algorithms   cost of a collective by the algorithm that runs it
gradients               when gradients are ready, in which bucket they go, where they are needed next
memory                  how much memory a step takes
gpus, roofline          peaks of GPU models; what matmuls ask of them
"""
