"""The `llm-worker-rbee bench` commands, one module each; the table of commands is in cli/__init__.py."""
