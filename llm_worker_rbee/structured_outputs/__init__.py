"""Structured outputs: grammars of answers, checked, compiled and matched."""
