"""Recordings of receivers: readers of their formats, their stations, and the clock behind their time stamps."""

from brim.rf.recordings.clock import Clock, fit_clock
from brim.rf.recordings.opening import ListedFile, open_recordings
from brim.rf.recordings.recording import Recording
from brim.rf.recordings.sites import Site, match_site, named_in, read_sites, sites_text

__all__ = [
    "Clock",
    "ListedFile",
    "Recording",
    "Site",
    "fit_clock",
    "match_site",
    "named_in",
    "open_recordings",
    "read_sites",
    "sites_text",
]
