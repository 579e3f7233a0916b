"""Wire formats over one engine: the OpenAI routes and the job routes."""
