"""The dashboard: pages in the browser that use the REST API and nothing else of brim."""
