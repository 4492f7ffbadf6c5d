"""Where the application listens, who may ask, and what a request may hold.

serve    listen, open a browser, serve until interrupted
guard    tokens, names of this machine, headers
bodies   bodies of bounded size, with inputs of a callback that exists
"""
