"""Images of requests: bytes to pixels in a process of its own, sizes and tiles by family. No model is known here."""
