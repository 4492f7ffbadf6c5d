"""The answers about runs as tools of an MCP server, for agents: read-only, and confined to given folders.

folders   which paths may be read
tools     what can be asked, with which arguments, and what each answers
server    the protocol, by the `mcp` package
"""
