"""A leaf-spine fabric of network namespaces: real routing, real cables with a rate, real traffic.

lab       hosts, leaves and spines as namespaces; cables that are fair; failures
traffic   flows between hosts, and their goodput
job       a real job over the hosts: its connections, and how long its steps take
rank      the program of one of its ranks
cases     what is drawn from a seed, predicted, and measured

"""
