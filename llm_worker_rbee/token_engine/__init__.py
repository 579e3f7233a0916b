"""Engines behind one protocol: token ids in, token ids out; in this process, in a child process, or elsewhere."""
