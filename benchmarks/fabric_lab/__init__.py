"""A leaf-spine fabric of network namespaces: real routing, real cables with a rate, real traffic.

lab       hosts, leaves and spines as namespaces; cables that are fair; failures
lifetime  nothing of a lab outlives the process that made it
traffic   flows between hosts, and their goodput
connections  connections that stay, and what each takes to move a message
blame     faults that are injected, and what is named for them
job       a real job over the hosts: its connections, and how long its steps take
rank      the program of one of its ranks
recorded  jobs that are recorded under a condition each, and the one predicted from the other
ranks     starts the ranks of those
cases     what is drawn from a seed, predicted, and measured

"""
