"""What parts of a job cost, by models that are fitted to it or published.

link_costs              what each operation and group takes over bytes, from its own transfers
curves                  times between measured sizes, and how far they may be off
network_tables          measured tables of communication, read
network_costs           what a collective takes by such a table, or a stand-in, with an interval
collective_algorithms   cost of a collective by the algorithm that runs it
gradients               when gradients are ready, in which bucket they go, where they are needed next
memory                  how much memory a step takes
gpus, roofline, mfu     peaks of GPU models; what matmuls ask of them, and what share of the peak that is
inputs                  how many samples and tokens a step works on
"""
