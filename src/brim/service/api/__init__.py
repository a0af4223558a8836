"""The API process: application, authentication, routes."""
