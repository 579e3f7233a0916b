"""Measuring: benchmarks, baselines, profiles, experiments. Every claim of speed is a command of this package.

A benchmark adds samples to a `Recorder`; the recorder makes results from them, so an interrupted run keeps its samples.
This package never imports the server: over HTTP it treats all OpenAI-compatible endpoints alike.
"""

# Of `bench micro` over all cases: a disturbance of some seconds then meets only a part of each case's samples.
ROUNDS = 12
