"""Embedding models measured: speed beside peers, cosine to float32, retrieval of a labelled set."""
