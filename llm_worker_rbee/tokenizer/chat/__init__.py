"""Chats: the template that renders them, the format of a model's answers, and the parser of these."""
