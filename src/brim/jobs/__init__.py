"""Durable jobs: what people ask for, who runs it, and what came of it."""
