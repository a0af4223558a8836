"""The scene, the link, the waveform, the channel and the receiver."""
