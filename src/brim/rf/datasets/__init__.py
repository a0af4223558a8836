"""Datasets to look at and to take away: summary, statistics, page, export."""
