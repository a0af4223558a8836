"""Requests in, batches through a model, answers out, each before its deadline."""
