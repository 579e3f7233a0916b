"""Requests in, token ids out. The engine speaks ids only: text lives in tokenizer/."""
