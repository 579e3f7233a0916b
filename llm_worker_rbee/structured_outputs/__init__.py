"""Structured outputs: what an answer must conform to, as a grammar that was checked, compiled and followed."""
