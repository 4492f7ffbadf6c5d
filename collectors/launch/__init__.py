"""Starting a job under the recorder."""
