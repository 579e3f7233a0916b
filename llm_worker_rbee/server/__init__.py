"""The worker on the wire: two dialects over one engine, watched and bounded."""
