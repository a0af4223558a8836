"""Starting the service's processes and keeping them alive."""
