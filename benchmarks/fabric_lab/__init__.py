"""A leaf-spine fabric of network namespaces: real routing, real cables with a rate, real traffic.

lab          hosts, leaves and spines as namespaces; cables shared fairly; failures
lifetime     removes a lab with the process that made it
traffic      flows between hosts, and their goodput
connections  connections that stay open, and the time and segments of each message
blame        injected faults, and the components named for them
job          a real job over the hosts: its connections, and the length of its steps
rank         the program of one of its ranks
recorded     jobs recorded under one condition each, and one predicted from another
ranks        starts the ranks of these jobs
replan       watched jobs on planned paths, and plans without a cable that becomes slow
pairs_job    the program of their ranks
cases        cases drawn from a seed, predicted, and measured
"""
