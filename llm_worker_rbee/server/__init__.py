"""The HTTP server: the dialects of six APIs over one engine, with admission, health, metrics and limits."""
