"""Measuring: benchmarks, baselines, profiles, experiments. Every claim of speed is a command of this room.

A benchmark adds samples to a `Recorder`; the recorder makes results of them, so that a run that is broken off keeps
what it has. This room never imports the server: over HTTP it sees any OpenAI-compatible endpoint alike.
"""
