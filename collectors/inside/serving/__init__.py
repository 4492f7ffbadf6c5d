"""What servers do: the iterations of their engine, and the requests that they answer."""
