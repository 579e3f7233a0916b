"""The HTTP server: two dialects over one engine, with admission, health, metrics and limits."""
