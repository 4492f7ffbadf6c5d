"""MCP server with the answers about runs as tools for agents: read-only, and confined to given folders."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "mcp": Command("dpro.extensions.mcp.command:mcp", "Serve answers about runs to AI agents.", "Share"),
    },
)
