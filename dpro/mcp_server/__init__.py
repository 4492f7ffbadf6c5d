"""The answers about runs as tools of an MCP server, for agents: read-only, and confined to given folders."""
